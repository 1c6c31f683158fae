"""Every field, documented. The default trains on synthetic textures, with no download.

    python train.py

Expected: half a minute on 2 CPU cores, validation accuracy above 0.95.
"""

from ml_collections import config_dict


def get_config() -> config_dict.ConfigDict:
    """All fields with their defaults; other config files start from it and show their difference."""
    c = config_dict.ConfigDict()

    c.dataset = config_dict.ConfigDict()
    c.dataset.name = "synthetic"  # "synthetic", "eurosat", a TFDS name, or a name for your own images
    c.dataset.source = "auto"  # auto | tfds | zip | folder | synthetic
    c.dataset.path = config_dict.placeholder(str)  # zip, folder of class folders, or TFDS data directory
    c.dataset.split_seed = 0  # of the 80/10/10 split, >= 0
    c.dataset.image_size = config_dict.placeholder(int)  # pixels, 8..1024; None keeps the images' size
    c.dataset.tfds_split = "train"  # which TFDS split(s) to read before our own split: "train+test"
    c.dataset.num_examples = 480  # synthetic images, >= 50
    # >= 1. An image of more pixels is refused, a file of more than 4 bytes for each of them, and metadata of more
    # than one for 32: no honest data set has such, but a small file can ask for gigabytes. As many pixels are
    # decoded at once, over all threads.
    c.dataset.max_image_pixels = 89_478_485

    c.augment = config_dict.ConfigDict()
    c.augment.storage = "expanded"  # expanded: all 8 views in device memory | on_device: an eighth of it
    c.augment.shift = 0  # pixels; training images are moved by up to as many each way, edges reflected
    c.augment.cache_dir = "~/.cache/largebatch"  # data caches, downloads and compiled programs; gs:// works

    c.model = config_dict.ConfigDict()
    c.model.name = "convnet"  # convnet (the seed's) | resconvnet | resconvnet7 | resnet8 | resnet50
    c.model.dtype = "float32"  # of the arithmetic: float32 | bfloat16; parameters stay float32
    c.model.conv = "auto"  # dot (slices and one matrix product) | lax | lax_padded | auto: dot on CPU, else lax

    c.model.norm = "auto"  # none | batch (of each micro-batch) | group | auto: none (convnets), group (resnets)
    c.model.norm_decay = 0.9  # 0..1, of the running statistics of batch normalisation, over updates
    c.model.stem = "conv"  # of the convnets: conv | whitened (frozen, computed from the training images)
    c.model.zero_head = False  # the last layer starts at zero

    c.batch = config_dict.ConfigDict()
    # Examples per update over all devices: an integer from 1 to 8 x training images, or "full" for all.
    c.batch.size = config_dict.FieldReference("full", field_type=object)
    # Examples per gradient evaluation on one device: an integer >= 1, or "auto".
    c.batch.micro_batch_size = config_dict.FieldReference("auto", field_type=object)
    # Instead of batch.size: a tuple of the batch sizes of all updates, or a CSV file of them (step,batchsize), or
    # one of available devices (a time or index, and GPUs, TPU_cores, ...). Updates left out keep the size before.
    c.batch.trace = config_dict.FieldReference(None, field_type=object)
    c.batch.per_device_batch_size = config_dict.placeholder(int)  # of a trace of available devices, >= 1
    c.batch.time_per_update = 1.0  # > 0, of a trace of available devices; in its unit of time, seconds for dates
    c.batch.hold_last = False  # whether the last size of a trace that ends before the run goes on
    # Grows the batch with the measured noise scale, from batch.size by powers of two, after a validation.
    c.batch.auto = False
    c.batch.max_size = config_dict.FieldReference("full", field_type=object)  # of batch.auto; as batch.size

    c.optimizer = config_dict.ConfigDict()
    c.optimizer.name = "lamb"  # sgd | lars | adam | adamw | nadamw | lamb | muon | soap
    c.optimizer.learning_rate = 0.01  # > 0; at schedule.reference_batch_size, where schedule.scaling is not none
    c.optimizer.momentum = 0.9  # 0..1; b1 of the Adam family
    c.optimizer.nesterov = False  # of sgd, lars and muon
    c.optimizer.momentum_correction = True  # of sgd and lars, when the rate changes
    c.optimizer.b2 = 0.999  # 0..1; decay of the second moment in the Adam family, of soap's preconditioner too
    c.optimizer.weight_decay = 0.0  # >= 0; in the gradient for sgd, lars and adam, beside it for the others
    c.optimizer.exclude_biases = True  # biases and norms have no weight decay and no trust ratio
    c.optimizer.clip_norm = config_dict.placeholder(float)  # > 0, of the whole gradient; None does not clip
    c.optimizer.bias_multiplier = 1.0  # > 0, of the rate of biases and norms
    c.optimizer.adamw_multiplier = 1.0  # > 0, of the rate of what muon leaves to AdamW: head, biases and norms

    c.schedule = config_dict.ConfigDict()
    c.schedule.name = "constant"  # constant | linear | cosine | step
    # Of the rate with the batch size: none | linear | sqrt | adascale (by the measured gain, for sgd only; then
    # inner_steps x outer_steps, warm-up and decay steps count scale-invariant steps, worth a reference batch each).
    c.schedule.scaling = "none"
    c.schedule.reference_batch_size = 512  # at which optimizer.learning_rate is right, >= 1
    # Linear warm-up, which is over at the last of these updates; one of the three, or none.
    c.schedule.warmup_updates = config_dict.placeholder(int)  # >= 1
    c.schedule.warmup_epochs = config_dict.placeholder(float)  # > 0, of all views
    c.schedule.warmup_examples = config_dict.placeholder(int)  # >= 1
    c.schedule.final_fraction = 0.0  # 0..1, of the peak rate at the end of linear and cosine
    c.schedule.decay_steps = ()  # of step: updates at which the rate decays
    c.schedule.decay_factor = 0.1  # of step: 0..1
    # rate | batch: grow the batch instead of cutting the rate, so that fewer updates see as many examples. The
    # numbers of updates in this file are then those of the batch as it starts.
    c.schedule.decay_by = "rate"
    c.schedule.noise_decay = 0.98  # 0..1, of the averages behind noise scale and AdaScale's gain, over updates

    c.sync = config_dict.ConfigDict()
    # every_step: one gradient psum per update | local: devices take local steps, and average their parameters after
    # every few of them | post_local: so from an update on.
    c.sync.mode = "every_step"
    c.sync.every = 1  # updates between two averages, >= 1
    c.sync.start_step = 0  # of post_local: the first update that is a local step
    c.sync.optimizer_state = "average"  # of every device, when parameters are averaged: average | keep | reset
    # How far the parameters go to their average: SGD with Nesterov momentum (DiLoCo); 1 and 0 take the average.
    c.sync.outer_learning_rate = 1.0  # > 0
    c.sync.outer_momentum = 0.0  # 0..1

    c.train = config_dict.ConfigDict()
    c.train.inner_steps = 10  # updates between two validations, >= 1
    c.train.outer_steps = 5  # validations, >= 1
    c.train.target_accuracy = config_dict.placeholder(float)  # 0..1: stop at it; None runs all steps
    c.train.label_smoothing = 0.0  # 0..1, share of a label spread over all classes
    c.train.ema_decay = config_dict.placeholder(
        float
    )  # 0..1: keep a moving average of the parameters, validated too
    c.train.init_from = config_dict.placeholder(str)  # run folder: start from its best parameters
    # A loss or gradient that is not finite: stop | skip (the update) | rollback (to the last saved validation).
    c.train.on_nonfinite = "stop"
    c.train.max_nonfinite = 5  # skipped updates in a row, or rollbacks in all, before the run has diverged
    c.train.rollback_factor = 0.5  # 0..1, of the learning rate

    c.eval = config_dict.ConfigDict()
    c.eval.view_average = False  # validate the mean over the 8 views of an image too, at 8 times the cost

    c.checkpoint = config_dict.ConfigDict()
    c.checkpoint.keep = 3  # latest checkpoints kept, beside the best one
    c.checkpoint.every_outer = 1  # validations between two checkpoints; a new best is always saved
    c.checkpoint.every_sec = 300.0  # seconds between two checkpoints inside an outer loop, >= 0

    c.log = config_dict.ConfigDict()
    c.log.tensorboard = True  # event files in WORKDIR/tensorboard

    c.devices = config_dict.ConfigDict()
    c.devices.platform = "auto"  # auto | cpu | gpu | tpu
    # Several hosts: found by itself on TPU pods, Slurm, Open MPI and under largebatch.pod; else give all three.
    c.devices.coordinator_address = config_dict.placeholder(str)  # "address:port" of host 0
    c.devices.num_hosts = config_dict.placeholder(int)
    c.devices.host_index = config_dict.placeholder(int)

    c.seed = 0  # of the parameters and the order of examples, >= 0
    return c
