"""Options of XLA that every program of the project is compiled with, by platform."""

import logging
import os
import re

import jax
import jaxlib

log = logging.getLogger(__name__)

# On a card: what may be part of a CUDA graph, which the driver starts at once. XLA's own choice, loops and
# convolutions. A loop is recorded only if all that is in it can be; then the host starts no kernel of it, and does
# not wait for its condition after each turn.
GPU_OPTIONS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,"
    "CONDITIONAL,WHILE,CONVOLUTION"
}
_UNKNOWN = re.compile(r"(?:No such compile option: '|While setting option )(\w+)")
_dropped: set[str] = set()  # that this process has told of


def options_for(platform: str) -> dict[str, str]:
    """The options of programs on `platform`, but for those that the environment variable XLA_FLAGS sets."""
    options = GPU_OPTIONS if platform in ("gpu", "cuda") else {}
    flags = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in options.items() if f"--{name}=" not in flags}


def compile_with(lowered: jax.stages.Lowered, options: dict[str, str]) -> jax.stages.Compiled:
    """Compile a program with those of `options` that this jaxlib knows, and log each that it does not know once."""
    options = dict(options)
    while True:
        try:
            return lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            unknown = _UNKNOWN.search(str(error))
            if unknown is None or unknown[1] not in options:
                raise
            value = options.pop(unknown[1])
            if unknown[1] not in _dropped:
                log.warning("jaxlib %s does not know --%s=%s: left out", jaxlib.__version__, unknown[1], value)
                _dropped.add(unknown[1])
