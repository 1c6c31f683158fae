"""Database of a study: opened by its URL, which is shown and recorded without its password."""

import functools
import logging
import time
import warnings

import optuna
import sqlalchemy
import sqlalchemy.exc

from largebatch.hosts import preemption
from largebatch.util import UserError

log = logging.getLogger("largebatch")

# Optuna sends heartbeats only in Study.optimize, which names trials by number. `TrialQueue` sends them itself.
warnings.filterwarnings("ignore", message="Heartbeat of storage is supposed to be used with Study.optimize")
warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)

# A trial's process counts as dead after so many missed heartbeats. Optuna compares heartbeats with the database's
# now(): that is one server's clock. SQLite has no server, and its now() is the UTC of the querying machine. So
# machines that share an SQLite file need clocks that agree to within the grace period.
MISSED_HEARTBEATS = 3
SQLITE_LOCK_TIMEOUT_SEC = 60
TRIES_TO_OPEN = 5
FIRST_WAIT_SEC, MAX_WAIT_SEC = 1.0, 10.0  # between two tries to reach the database
# Exceptions that are raised while the database cannot be reached.
DATABASE_ERRORS = (optuna.exceptions.StorageInternalError, sqlalchemy.exc.DBAPIError, sqlalchemy.exc.TimeoutError)
# Error texts of databases for the slower of two processes that create the same table.
TABLE_EXISTS = ("already exists", "duplicate key", "UNIQUE constraint")


def without_password(url: str) -> str:
    """Return a database URL without its password, which may be shown and recorded.

    Raises:
      UserError: the text is no URL, or its password was already replaced by ***.
    """
    try:
        shown = sqlalchemy.engine.make_url(url).render_as_string(hide_password=True)
    except sqlalchemy.exc.ArgumentError as error:
        raise UserError(
            f"--storage: {url!r}; allowed: a database URL, as sqlite:///FILE or postgresql://HOST/DB"
        ) from error
    if shown == url and ":***@" in url:
        raise UserError(f"--storage: the study is in {url}; give the URL with its password")
    return shown


def open_storage(url: str, heartbeat_sec: int) -> optuna.storages.RDBStorage:
    """Open a database that SQLAlchemy knows, and create its tables.

    Raises:
      UserError: the database cannot be opened.
    """
    is_sqlite = url.startswith("sqlite")
    options = {"pool_pre_ping": True}  # a pooled connection may have been cut
    if is_sqlite:
        options["connect_args"] = {"timeout": SQLITE_LOCK_TIMEOUT_SEC}
    for tries_left in reversed(range(TRIES_TO_OPEN)):
        try:
            storage = optuna.storages.RDBStorage(
                url,
                engine_kwargs=options,
                heartbeat_interval=heartbeat_sec,
                grace_period=MISSED_HEARTBEATS * heartbeat_sec,
            )
            break
        except (*DATABASE_ERRORS, sqlalchemy.exc.ArgumentError, ImportError, RuntimeError) as error:
            reason = _first_line(error)
            if not tries_left or not any(text in reason for text in TABLE_EXISTS):
                raise UserError(f"--storage: {without_password(url)} cannot be opened ({reason})") from error
        time.sleep(1)  # another process is creating the tables
    if is_sqlite:
        _lock_from_the_start(storage.engine)
    return storage


def _lock_from_the_start(engine: sqlalchemy.engine.Engine) -> None:
    """Make every SQLite transaction lock the database when it begins.

    Optuna keeps two processes from taking the same trial by SELECT ... FOR UPDATE, which SQLite does not have.
    """

    @sqlalchemy.event.listens_for(engine, "connect")
    def leave_transactions_to_us(connection, record):
        connection.isolation_level = None

    @sqlalchemy.event.listens_for(engine, "begin")
    def begin(connection):
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    engine.dispose()  # earlier connections have no such listeners


def waits_for_database(function):
    """Make a function wait until the database can be reached, with messages and increasing waits.

    The function may then raise `preemption.Stopped`: a signal came to this host during a wait.
    """

    @functools.wraps(function)
    def waiting(*args, **kwargs):
        wait_sec, started = FIRST_WAIT_SEC, time.monotonic()
        while True:
            try:
                result = function(*args, **kwargs)
            except DATABASE_ERRORS as error:
                reason = _first_line(error)
                log.warning("the study's database does not answer (%s); trying again in %.0f s", reason, wait_sec)
                time.sleep(wait_sec)
                if number := preemption.first_signal():
                    raise preemption.Stopped(number) from error
                wait_sec = min(2 * wait_sec, MAX_WAIT_SEC)
                continue
            if wait_sec > FIRST_WAIT_SEC:
                log.info("the study's database answers again after %.0f s", time.monotonic() - started)
            return result

    return waiting


def _first_line(error: Exception) -> str:
    """Return the first line of a database error, of the driver's if SQLAlchemy or Optuna wrapped it."""
    return str(error.__cause__ or error).strip().splitlines()[0]
