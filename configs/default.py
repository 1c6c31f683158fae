"""Every field, documented. The default trains on synthetic textures, with no download.

    python train.py

Expected: half a minute on 2 CPU cores, validation accuracy above 0.95.

An update is one update of the optimizer. The originals are the training images as they are, without further views.
"""

from ml_collections import config_dict


def get_config() -> config_dict.ConfigDict:
    """All fields with their defaults; other config files start from it and show their difference."""
    c = config_dict.ConfigDict()

    c.dataset = config_dict.ConfigDict()
    c.dataset.name = "synthetic"  # "synthetic", "scenes", "eurosat", a TFDS name, or one for your own images
    c.dataset.source = "auto"  # tfds | zip | folder | synthetic | auto: by name and path
    # A zip or folder of class folders, or of images/ with masks/, depths/ or both, perhaps within train, val and
    # test folders; or a TFDS data directory.
    c.dataset.path = config_dict.placeholder(str)
    # Training, validation and test images: auto takes split_file, else the splits that the set is published with,
    # else our random 80/10/10 | published: never ours | own: always ours.
    c.dataset.splits = "auto"
    # CSV file with the columns id and split; or a path with {split} in it, for a file of ids for each of train, val
    # and test. Images that it does not name are left out.
    c.dataset.split_file = config_dict.placeholder(str)
    c.dataset.split_seed = 0  # >= 0; of our split, and of what is cut from train where val or test is not published
    # Pixels to resize to, 8..1024: a square, or (height, width); None keeps the size.
    c.dataset.image_size = config_dict.placeholder(object)
    c.dataset.resize = "stretch"  # stretch | crop (the central part) | pad (black bars), of images that are resized
    # 1 makes grey of RGB, 3 makes RGB of grey, any other number must be that of the files; None takes theirs.
    c.dataset.channels = config_dict.placeholder(int)
    # TFDS split(s) to read, as "train+test", to be split by us; None takes train, val and test as published.
    c.dataset.tfds_split = config_dict.placeholder(str)
    c.dataset.num_examples = 480  # synthetic images, >= 50
    # >= 1. Refused before decoding: an image of more pixels than this, a file of more than 4 bytes for each of
    # these pixels, and metadata of more than 1 byte for 32 of them. (A small hostile file can ask for gigabytes of
    # memory.) No more pixels than this are decoded at the same time, over all threads.
    c.dataset.max_image_pixels = 89_478_485

    c.augment = config_dict.ConfigDict()
    # Views of each training image: all (8: four rotations, each with and without a flip; for square images) | flip
    # (2: with and without a flip left/right) | none (1: as it is).
    c.augment.views = "all"
    # What of the training images is on the devices: expanded (all views) | on_device (the originals alone) |
    # streamed (originals of the next updates, read while others run) | auto: the first that fits.
    c.augment.storage = "auto"
    # Each visit of a training image changes it at random, by what is on of these, in this order.
    c.augment.crop_scale = 1.0  # above 0, up to 1: off; smallest share of the area that a crop has; resized back
    c.augment.shift = 0  # pixels; moves the image by up to this, edges reflected
    c.augment.brightness = 0.0  # 0..1; multiplies pixels by 1 - this to 1 + this
    c.augment.contrast = 0.0  # 0..1; multiplies their distance from the mean of the image's channel by the same
    c.augment.cutout = 0  # pixels; side of a square that is set to the mean of the training images
    c.augment.cache_dir = "~/.cache/largebatch"  # data caches, downloads and compiled programs; gs:// works

    c.task = config_dict.ConfigDict()
    c.task.name = "classification"  # classification | segmentation | depth | mask_depth; what the data set holds
    c.task.mask_loss = "cross_entropy"  # cross_entropy | dice | cross_entropy_dice | focal
    c.task.depth_loss = "l1"  # l1 | berhu | gradient
    c.task.depth_weight = 1.0  # > 0, of the depth's loss beside the mask's

    c.model = config_dict.ConfigDict()
    # convnet | resconvnet | resconvnet7 | resconvnet_wide | airbench | airbench_small | resnet8 | resnet50;
    # for masks and depths resunet | resunet_tiny | unet_tiny
    c.model.name = "convnet"
    # Of the arithmetic; parameters stay float32: float32 | bfloat16 | auto: bfloat16 on TPUs, GPUs and CPUs with
    # AVX512_BF16 or AMX, else float32. A run or study keeps the one that it began with.
    c.model.dtype = "float32"
    # Convolution: dot (slices and one matrix product) | lax | lax_blocks (lax, with a first layer for tensor cores)
    # | auto: dot on CPUs, lax_blocks on GPUs, else lax.
    c.model.conv = "auto"
    # Normalisation: none | batch (statistics of each ghost batch) | group | auto: none (convnets), group (others).
    c.model.norm = "auto"
    c.model.norm_decay = 0.9  # 0..1, per update; of the running statistics of batch normalisation
    # First layer of convnets and airbench: conv | whitened (frozen, from the training images).
    c.model.stem = "conv"
    c.model.zero_head = False  # the last layer starts at zero
    # Linear classifiers behind inner layers of the convnets; the mean of their losses is added in training.
    c.model.side_heads = False

    c.batch = config_dict.ConfigDict()
    # Images per update over all devices: an integer from 1 to views x originals, or "full" for all of them.
    c.batch.size = config_dict.FieldReference("full", field_type=object)
    # Images per gradient evaluation on one device: an integer >= 1, a multiple of ghost_size; or "auto".
    c.batch.micro_batch_size = config_dict.FieldReference("auto", field_type=object)
    # Up to as many images of a device are normalised together by model.norm batch: an integer >= 2. None: a
    # micro-batch is.
    c.batch.ghost_size = config_dict.placeholder(int)
    # Parts of the training set, from which a batch takes images in turn: at least as many as there will be devices.
    # None chooses by the number of training images: 480 for EuroSAT.
    c.batch.virtual_shards = config_dict.placeholder(int)
    # In place of batch.size: a tuple with the batch size of every update, a CSV file with the columns step and
    # batchsize, or a CSV file of available devices (a time or index, and GPUs, TPU_cores, ...). Updates that a file
    # leaves out keep the size before.
    c.batch.trace = config_dict.FieldReference(None, field_type=object)
    # Images that every device takes, >= 1: of the devices in a trace; or, in place of batch.size, of those that are
    # there at every start of the run.
    c.batch.per_device_batch_size = config_dict.placeholder(int)
    c.batch.time_per_update = 1.0  # > 0, in the unit of such a trace's time; seconds where it has dates
    c.batch.hold_last = False  # the last size of a trace lasts until the end of the run
    # After a validation, the batch grows with the measured noise scale: from batch.size by powers of two. With
    # LAMB, Muon and SOAP-Muon that is about 2 to 20 times below the critical batch, so it grows late or never.
    c.batch.auto = False
    c.batch.max_size = config_dict.FieldReference("full", field_type=object)  # largest batch of batch.auto

    c.optimizer = config_dict.ConfigDict()
    c.optimizer.name = "lamb"  # sgd | lars | adam | adamw | nadamw | lamb | muon | soap | soap_muon
    c.optimizer.learning_rate = 0.01  # > 0, the peak; at schedule.reference_batch_size if that is scaled
    c.optimizer.momentum = 0.9  # 0..1; b1 of the Adam family
    c.optimizer.nesterov = False  # of sgd, lars and muon; of soap_muon only in its AdamW part
    c.optimizer.momentum_correction = True  # of sgd and lars: keeps the rate out of the momentum
    c.optimizer.b2 = 0.999  # 0..1; decay of Adam's second moment, and of soap's and soap_muon's preconditioner
    c.optimizer.weight_decay = 0.0  # >= 0; in the gradient for sgd, lars and adam, decoupled for the others
    c.optimizer.exclude_biases = True  # biases and norms have no weight decay and no trust ratio
    c.optimizer.clip_norm = config_dict.placeholder(float)  # > 0, of the whole gradient; None does not clip
    c.optimizer.bias_multiplier = 1.0  # > 0, of the rate of biases and norms
    c.optimizer.soap_every = 10  # >= 1; updates between two refreshes of soap's and soap_muon's bases
    c.optimizer.adamw_multiplier = 1.0  # > 0, of the rate of muon's and soap_muon's AdamW part: head, biases, norms

    c.schedule = config_dict.ConfigDict()
    c.schedule.name = "constant"  # constant | linear | cosine | step
    # How the rate follows the batch size: none | linear | sqrt | adascale (by the measured gain; sgd only). With
    # adascale, inner_steps x outer_steps, warm-up and decay steps count scale-invariant steps: one is worth an
    # update of the reference batch.
    c.schedule.scaling = "none"
    # How optimizer.b2 follows the batch size: none | half_life (b2 ** (batch / reference): as many images as at the
    # reference batch halve the weight of a gradient in the second moment).
    c.schedule.b2_scaling = "none"
    c.schedule.reference_batch_size = 512  # >= 1; the batch for which learning_rate and b2 are right
    # Linear warm-up: the last of these updates has the peak rate. Give one of the three, or none.
    c.schedule.warmup_updates = config_dict.placeholder(int)  # >= 1
    c.schedule.warmup_epochs = config_dict.placeholder(float)  # > 0; an epoch is all views of all originals
    c.schedule.warmup_examples = config_dict.placeholder(int)  # >= 1
    c.schedule.final_fraction = 0.0  # 0..1, of the peak rate at the end of linear and cosine
    c.schedule.decay_steps = ()  # of step: updates at which the rate decays
    c.schedule.decay_factor = 0.1  # of step and seesaw: 0..1
    # What a decay step changes: rate | batch (it grows instead, and fewer updates see as many images) | seesaw (the
    # batch grows by as much, and the rate falls by the root of it; linear and cosine become steps). Where the batch
    # grows, the numbers of updates in this file count updates of the first batch size.
    c.schedule.decay_by = "rate"
    c.schedule.decay_over = "updates"  # of linear and cosine: updates | images; differ where the batch changes
    c.schedule.noise_decay = 0.98  # 0..1, per measurement; of the averages behind noise scale and AdaScale's gain

    c.sync = config_dict.ConfigDict()
    # every_step: one gradient psum per update | local: devices make updates of their own, and average their
    # parameters every few of them | post_local: every_step at first, local from sync.start_step on.
    c.sync.mode = "every_step"
    c.sync.every = 1  # updates between two averages, >= 1
    c.sync.start_step = 0  # of post_local: the first local update
    c.sync.optimizer_state = "average"  # at an average, momentum and the like: average | keep | reset
    # The outer step at an average: SGD with Nesterov momentum (DiLoCo). 1 and 0 take the average as it is.
    c.sync.outer_learning_rate = 1.0  # > 0
    c.sync.outer_momentum = 0.0  # 0..1

    c.train = config_dict.ConfigDict()
    # Updates between two validations: an integer >= 1, or "pass" for as many as take every original about once
    # (originals / batch.size, rounded up; only where the batch size stays as it is).
    c.train.inner_steps = config_dict.FieldReference(10, field_type=object)
    c.train.outer_steps = 5  # validations, >= 1
    # Stop when validation reaches it: the accuracy, 0..1; or the score of any task.
    c.train.target_accuracy = config_dict.placeholder(float)
    c.train.target_score = config_dict.placeholder(float)
    c.train.label_smoothing = 0.0  # 0..1, share of a label spread over all classes
    c.train.ema_decay = config_dict.placeholder(float)  # 0..1; validates a moving average of parameters too
    c.train.init_from = config_dict.placeholder(str)  # run folder: start from its best parameters
    # >= 1; of init_from: start from its checkpoint of this update instead, with the optimizer's moments.
    c.train.init_step = config_dict.placeholder(int)
    # A loss or gradient that is not finite: stop | skip (the update) | rollback (to the last saved validation).
    c.train.on_nonfinite = "stop"
    c.train.max_nonfinite = 5  # skipped updates in a row, or rollbacks in all, before the run has diverged
    c.train.rollback_factor = 0.5  # 0..1; the learning rate is multiplied by it at a rollback

    c.eval = config_dict.ConfigDict()
    # Validates the mean over copies of an image too, each at the cost of a validation: its views, and the image as
    # it is (with half of the weight), moved up and left, and moved down and right by so many pixels (0: off).
    c.eval.view_average = False
    c.eval.shift_average = 0

    c.checkpoint = config_dict.ConfigDict()
    c.checkpoint.keep = 3  # latest checkpoints kept, beside the best one
    c.checkpoint.every_outer = 1  # validations between two checkpoints; a new best is always saved
    # Seconds until a checkpoint is written between two validations: a number >= 0, or "auto" to lose the least time
    # by what a save costs and how often the run has failed.
    c.checkpoint.every_sec = config_dict.FieldReference("auto", field_type=object)

    c.log = config_dict.ConfigDict()
    c.log.tensorboard = True  # event files in WORKDIR/tensorboard
    c.log.wandb = False  # Weights & Biases; offline, in WORKDIR/wandb, where there is no key or no network
    c.log.wandb_project = "largebatch"  # 1..128 characters, none of / \ # ? % :
    # Updates from one measurement of the gradient's noise to the next: an integer >= 0 (0: never), or "auto": 1 on
    # a CPU; elsewhere 10 with batch.auto or adascale, which need it, and else 0.
    c.log.noise_every = config_dict.FieldReference("auto", field_type=object)

    c.devices = config_dict.ConfigDict()
    c.devices.platform = "auto"  # auto | cpu | gpu | tpu
    # Several hosts find each other on TPU pods, Slurm, Open MPI and under largebatch.pod; what is given of these is
    # then heeded. Elsewhere give all three.
    c.devices.coordinator_address = config_dict.placeholder(str)  # of host 0: "HOST:PORT", "HOST" or ":PORT"
    c.devices.num_hosts = config_dict.placeholder(int)  # 1 with no address: alone, whatever is found
    c.devices.host_index = config_dict.placeholder(int)
    c.devices.join_sec = 300.0  # 1 to 86400; how long the hosts wait for each other at the start

    c.seed = 0  # >= 0; of the parameters and the order of examples
    return c
