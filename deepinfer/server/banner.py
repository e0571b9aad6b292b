"""The lines that ``deepinfer serve`` prints when it takes requests: what it serves, and how a person begins."""

from __future__ import annotations

import json
import shlex
from typing import Final

from deepinfer import __version__
from deepinfer.config import ServerArgs
from deepinfer.engine.ipc import Ready

_LOCAL: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""An address that means every interface -> the address to reach it from this machine."""


def banner(args: ServerArgs, facts: Ready, port: int, description: str) -> str:
    """The lines, without the last line break.

    Args:
        args: settings of the server.
        facts: of its engine.
        port: where it listens.
        description: of the model.
    """
    host = _LOCAL.get(args.host, args.host)
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    memory = facts.memory
    body = json.dumps({"model": args.served_model_names[0], "messages": [{"role": "user", "content": "Hello"}]})
    key = ' -H "authorization: Bearer $API_KEY"' if args.api_keys else ""
    lines = {
        "model": f"{description}, context of {facts.max_model_len:,} tokens",
        "memory": f"{_size(memory.weight_bytes)} of weights and {_size(memory.cache_bytes)} of cache for "
        f"{memory.num_cache_tokens:,} tokens on {memory.device}",
        "page": f"{url}/",
        "OpenAI": f"{url}/v1",
        "Anthropic": url,
        "metrics": f"{url}/metrics",
        "try": f"curl {url}/v1/chat/completions{key} -H 'content-type: application/json' -d {shlex.quote(body)}",
    }
    rows = [f"  {name:<9} {text}" for name, text in lines.items()]
    return "\n".join([f"deepinfer {__version__} serves {', '.join(args.served_model_names)}", *rows])


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
