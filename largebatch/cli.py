"""The start and end of every script: command line, JAX, exit codes."""

import contextlib
import dataclasses
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import jax
from absl import flags
from etils import epath

from largebatch import terminal
from largebatch.config import rules
from largebatch.config.dicts import RULES, difference
from largebatch.config.fields import Config
from largebatch.config.rules import Models, nearest_field
from largebatch.hardware.chips import AUTO, auto_dtype
from largebatch.hosts import collectives
from largebatch.hosts.start import start_jax, wait_for_failing_hosts
from largebatch.util import UserError, expanded, printable

if TYPE_CHECKING:  # `parse_flags` alone needs it
    from ml_collections import config_dict

log = logging.getLogger("largebatch")
flags.disclaim_key_flags()  # what `path_flag` defines are flags of the script that calls it

ROOT = Path(__file__).resolve().parents[1]
EXIT_FAILED, EXIT_USAGE, EXIT_DIVERGED, EXIT_INTERRUPTED, EXIT_PREEMPTED = 1, 2, 3, 130, 143
ALONE_HELP = "Work on this host alone, whatever cluster it is part of."
CONFIG_HELP = """
  --config: Config file; configs/default.py, where it is not given.
  --config.FIELD: Another value for a field of it, as in --config.batch.size 1024;
    docs/config.md has all fields.
"""
AGREED_EXITS = (EXIT_DIVERGED, EXIT_INTERRUPTED, EXIT_PREEMPTED)  # all hosts end with them together


def use_compilation_cache(cache_dir: str) -> None:
    """Keep compiled programs between runs: in JAX_COMPILATION_CACHE_DIR if that is set, else below `cache_dir`.

    The first call of a process decides, as in JAX. Programs are code. So a script whose config comes from a folder
    that others may have made calls this before it reads the config, with a `cache_dir` of the user's own.
    """
    if not jax.config.jax_compilation_cache_dir:
        folder = epath.Path(expanded(cache_dir, "augment.cache_dir")) / "xla"
        jax.config.update("jax_compilation_cache_dir", str(folder))
    # Programs that are small or quick to compile are kept too.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def start(
    config: "config_dict.ConfigDict",
    models: Models,
    recorded: Callable[[], dict | None] | None = None,
    *,
    of: str = "run",
) -> tuple[Config, dict]:
    """Start JAX on a config that all hosts agree on, with model.dtype "auto" replaced by what it stands for.

    What is resumed keeps the dtype that it began with; a machine that would choose another logs that. What is new
    takes the dtype of host 0's machine.

    Args:
      models: see `rules.check`.
      recorded: returns, on host 0, the config that is resumed, as plain JSON; None if it is new.
      of: "run" or "study", for the log.
    Returns:
      The config; and the same as plain JSON, as it will be read back from a file.
    Raises:
      UserError: the config is bad or differs from that of host 0, or the devices or hosts are not there.
    """
    config = rules.check(config.to_dict(), models)
    use_compilation_cache(config.augment.cache_dir)
    start_jax(**dataclasses.asdict(config.devices))
    plain = dataclasses.asdict(config)
    plain["devices"]["host_index"] = None  # the only field that differs between hosts
    configs = collectives.gather_json(plain)
    for host, config_of_host in enumerate(configs):
        if changed := difference(configs[0], config_of_host, ("on host 0", f"on host {host}")):
            raise UserError(f"hosts disagree about the config: {changed}")
    if config.model.dtype == AUTO:
        begun, here = recorded and collectives.agreed(recorded, collectives.is_primary()), auto_dtype()
        dtype = collectives.json_from_primary(begun["model"]["dtype"] if begun else here)
        if dtype != here:
            log.info("model.dtype: auto is %s in this %s; here it would be %s", dtype, of, here)
        config = config.replace(model={"dtype": dtype})
        configs[0]["model"]["dtype"] = dtype
    return config, configs[0]


# ---- scripts ----------------------------------------------------------------------------------------


def run_script(main: Callable[["config_dict.ConfigDict"], int | None], models: Models) -> NoReturn:
    """Parse --config and its overrides, check the config, run `main` and exit; see `exit_after`.

    Args:
      models: see `rules.check`.
    """
    terminal.log_to_stderr()
    logging.getLogger("largebatch").setLevel(logging.INFO)

    def parse_and_run():
        config = parse_flags(sys.argv)
        rules.check(config.to_dict(), models)
        return main(config)

    exit_after(parse_and_run)


def exit_after(main: Callable[[], int | None]) -> NoReturn:
    """Run `main` and exit with the code that it returns.

    Errors that the user can correct (UsageError, UserError) are printed as one line on stderr, without a traceback.
    """
    code, script = EXIT_FAILED, Path(sys.argv[0]).name
    with contextlib.suppress(OSError):  # nobody reads stderr any more, as where the launcher was killed
        try:
            code = main() or 0
        except UsageError as error:
            code = EXIT_USAGE
            print(f"{script}: {printable(error)}", file=sys.stderr)
        except UserError as error:
            print(f"{script}: error: {printable(error)}", file=sys.stderr)
        except KeyboardInterrupt:
            code = EXIT_INTERRUPTED
        except Exception:  # a fault of the program: shown in full
            traceback.print_exc()
    if code not in (0, *AGREED_EXITS) and jax.distributed.is_initialized():
        # The usual exit waits for the other hosts, and they may be waiting for this one.
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        wait_for_failing_hosts()
        os._exit(code)
    sys.exit(code)


class UsageError(Exception):
    """Raised for a command line that cannot be read. Its text is one line."""


class _PathParser(flags.ArgumentParser):
    """Parser of paths and bucket URLs."""

    def parse(self, argument: str) -> str:
        try:
            return expanded(argument)
        except UserError as error:
            raise ValueError(str(error)) from error


def path_flag(name: str, default: str | None, help_text: str) -> None:
    """Define a flag that names a file or folder."""
    flags.DEFINE(_PathParser(), name, default, help_text, serializer=flags.ArgumentSerializer())


def parse_flags(argv: list[str]) -> "config_dict.ConfigDict":
    """Return the config that `argv` asks for.

    Raises:
      UsageError: unknown or malformed flag, or a config file that cannot be run.
    """
    from ml_collections import config_dict, config_flags

    if "--help" in argv:
        show_help(CONFIG_HELP)
    may_be_none = {f"--config.{field}=None": field for field, rule in RULES.items() if rule.allows(None)}
    try:
        argv = _join_values(argv)
        set_to_none = [may_be_none[arg] for arg in argv if arg in may_be_none]  # config_flags cannot parse it
        argv = [arg for arg in argv if arg not in may_be_none]
        # Defines a flag for every override in `argv`, so that the parser of flags knows them.
        default = str(ROOT / "configs" / "default.py")
        config_flags.DEFINE_config_file("config", default, "Config file.", sys_argv=argv)
        rest = parse_plain_flags(argv)
        if not isinstance(flags.FLAGS.config, config_dict.ConfigDict):  # config_flags' stand-in for a missing file
            raise UsageError(f"--config: there is no file {flags.FLAGS['config'].config_filename}")
        flags.FLAGS.config.update_from_flattened_dict(dict.fromkeys(set_to_none))
    except UsageError:
        raise
    except UserError as error:
        raise UsageError(str(error)) from error
    except Exception as error:  # of an override of a field that is not there, or whatever a config file raises
        names = [arg.split("=")[0].removeprefix("--config.") for arg in argv if arg.startswith("--config.")]
        bad = [f"--config.{name}: unknown field{nearest_field(name)}" for name in names if name not in RULES]
        cannot_run = f"--config: the file cannot be run: {type(error).__name__}: {_last_line(error)}"
        is_unknown = isinstance(error, (AttributeError, KeyError)) and bad
        raise UsageError("; ".join(bad) if is_unknown else cannot_run) from error
    if rest:
        raise UsageError(f"unexpected argument {rest[0]!r}; allowed: --config FILE, --config.FIELD VALUE")
    return flags.FLAGS.config


def parse_plain_flags(argv: list[str]) -> list[str]:
    """Parse absl flags; return the arguments that are no flags.

    Raises:
      UsageError: unknown or malformed flag.
    """
    if "--help" in argv:
        show_help()
    try:
        return flags.FLAGS(argv)[1:]
    except flags.Error as error:
        message = _last_line(error)
        # Config fields of the wrong type, in the words of their rules.
        found = re.match(r"flag --config\.(?P<field>[\w.]+)=(?P<value>.*?): ", message)
        if found and found["field"] in RULES:
            message = f"{found['field']}: {found['value']!r}; allowed: {RULES[found['field']].text}"
        raise UsageError(message) from error


def show_help(more: str = "") -> NoReturn:
    """Print the script's docstring and its flags, and exit."""
    print(f"{sys.modules['__main__'].__doc__ or ''}\n{flags.FLAGS.main_module_help()}{more}")
    sys.exit(0)


def _join_values(argv: list[str]) -> list[str]:
    """Join "--config", "FILE" and "--config.FIELD", "VALUE" by "=", with ~ replaced in FILE.

    config_flags takes a field of mixed type (batch.size) for a switch, and would not read the value after it.

    Raises:
      UserError: there is no such home folder.
    """
    joined = []
    for arg in argv:
        if joined and re.fullmatch(r"--config(\.[\w.]+)?", joined[-1]) and not arg.startswith("--"):
            joined[-1] += f"={arg}"
        else:
            joined.append(arg)
    file = "--config="
    return [file + expanded(arg[len(file) :], "--config") if arg.startswith(file) else arg for arg in joined]


def _last_line(error: BaseException) -> str:
    """Return an error's text in one line; of the traceback that config_flags puts in it, only the last line."""
    before, _, trace = str(error).strip().partition("Traceback (most recent call last):")
    last = trace.splitlines()[-1] if trace else ""
    return " ".join(f"{before} {last}".split())
