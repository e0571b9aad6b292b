"""Settings of the HTTP server, checked once and then frozen."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from deepinfer.config.environment import environment, has_otlp_endpoint
from deepinfer.errors import ConfigError

_MOST_SECONDS: Final = 86_400.0
_LIMITS: Final[dict[str, tuple[float, float, str]]] = {
    "port": (0, 65535, "a port from 1 to 65535, or 0 for a free one"),
    "max_body_bytes": (1024, 1 << 34, "at least 1024 bytes"),
    "max_waiting": (1, 1_000_000, "a positive number of requests"),
    "drain_s": (0, _MOST_SECONDS, "seconds, at most a day"),
    "keep_alive_s": (0.05, _MOST_SECONDS, "seconds from 0.05 to a day"),
    "deadline_s": (0.001, math.inf, "a positive number of seconds, or infinity"),
}
"""Setting -> (least, greatest, the expected value in words)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerArgs:
    """Settings of ``deepinfer serve``.

    Attributes:
        host, port: address that the API listens on; port 0 takes a free port.
        served_model_names: names that requests may use; the first one stands in answers to other names.
        api_keys: keys that requests must have; () lets everybody in.  The default is ``DEEPINFER_API_KEY``.
        admin_port, admin_token: address and key of the admin API; None for no admin API.
        max_body_bytes: largest body of a request.
        max_waiting: requests of one priority class that may wait for their first token.
        drain_s: seconds that open requests may take after SIGTERM.
        keep_alive_s: seconds without output until a stream sends a sign of life.
        deadline_s: seconds that a request may take; a request can shorten it with a header.
        otlp_endpoint: base address of an OTLP collector that gets spans; None sends spans only if the standard variable
            ``OTEL_EXPORTER_OTLP_ENDPOINT`` is set.
        allow_image_urls: fetch images from addresses that requests name; only global addresses are used.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = field(default_factory=lambda: environment().api_key)
    admin_port: int | None = None
    admin_token: str | None = None
    max_body_bytes: int = 128 << 20
    max_waiting: int = 1024
    drain_s: float = 30.0
    keep_alive_s: float = 15.0
    deadline_s: float = math.inf
    allow_image_urls: bool = False
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        """Check every value.

        Raises:
            ConfigError: a value is not allowed.  The message names the setting, its value and the allowed values.
        """
        for name, (low, high, expected) in _LIMITS.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"{name}={value} is out of range; use {expected}")
        if not self.served_model_names or not all(self.served_model_names):
            raise ConfigError("served_model_name has an empty name; give at least one name, separated by commas")
        if not all(self.api_keys):
            raise ConfigError("api_key is empty; give a key, or leave it out to let everybody in")
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"otlp_endpoint={self.otlp_endpoint!r} is no address; give one such as http://127.0.0.1:4318")
        if (self.admin_port is None) != (self.admin_token is None) or self.admin_token == "":
            raise ConfigError("admin_port and admin_token go together; give both, or neither")
        if self.admin_port is not None and not 0 <= self.admin_port <= 65535:
            raise ConfigError(f"admin_port={self.admin_port} is out of range; use a port from 1 to 65535")

    @property
    def is_traced(self) -> bool:
        """Whether spans are sent."""
        return self.otlp_endpoint is not None or has_otlp_endpoint()
