"""EuroSAT with all 13 bands of Sentinel-2, 16 bits each: eurosat_muon.py with other images.

    python train.py --config configs/eurosat_ms.py --config.dataset.path EuroSAT_MS.zip --workdir runs/eurosat_ms

The zip (or folder) is the one of Helber et al. 2019 with TIFF tiles of 64x64 pixels, CLASS/CLASS_N.tif. Every
band is normalised by its own mean and deviation.

Expected: not run on it yet; on 13 bands that were made from the RGB images it trains, evaluates and reports.
"""

from configs import eurosat_muon


def get_config():
    c = eurosat_muon.get_config()
    c.dataset.name = "eurosat_ms"
    c.dataset.channels = 13
    return c
