"""train.py or evaluate.py with limits so low that validation is read in blocks and predictions written in parts."""

import runpy
import sys

from largebatch.data import sharded_split
from largebatch.predictions import files as prediction_files

sharded_split.RESIDENT_SHARE, sharded_split.BLOCK_BYTES = 0.0, 2 * 16 * 16 * 3
prediction_files.LOGITS_PER_PART = 7 * 5
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
