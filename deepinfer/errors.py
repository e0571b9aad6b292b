"""Every deliberate exception, drawn as a tree.

    EngineError
    ├── ConfigError      the operator must change a setting or a file; raised before serving starts
    │   └── CheckpointError   the files of a model do not hold what its configuration promises
    ├── RequestError     the caller must change the request; becomes HTTP 4xx
    │   └── ContextTooLong
    ├── Overloaded       no room now, try again; HTTP 429 or 503
    └── StepFailed       device or peer fault; the process exits and the router moves on

A message says what was asked, what the limit is and what to do.  ``assert`` is for our own bugs, never for input.
"""


class EngineError(Exception):
    """Root of all errors that deepinfer raises on purpose."""


class ConfigError(EngineError):
    """A setting, a configuration file or a model directory is not usable as it is."""


class CheckpointError(ConfigError):
    """A checkpoint is damaged or belongs to another configuration; lists everything that is wrong."""


class RequestError(EngineError):
    """A request cannot be served as it was asked."""


class ContextTooLong(RequestError):
    """Prompt plus requested output exceed the context limit."""


class Overloaded(EngineError):
    """There is no room for the request now; trying again later may work."""


class StepFailed(EngineError):
    """A device or a peer failed in the middle of a step; nothing it computed may be used."""
