"""Choice of the replica that answers a request on Ray Serve: the turns of a conversation go to one replica.

Rendezvous hashing: each replica has a score for each conversation, and the one with the highest is chosen. If a replica
ends, only its conversations move; if one starts, it takes an equal share of all others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

try:
    from ray.serve.request_router import RequestRouter
except ImportError:  # Ray is optional, and this module can be documented without it
    RequestRouter = object

PREFIX = 256  # characters or token ids of a prompt that identify it


def conversation_key(body: bytes) -> str:
    """Return a key that all turns of a conversation share: a hash of the messages up to the first one of a user.

    Args:
        body: body of a request for chat completions, completions or responses. For a prompt, its beginning counts; for
            other bodies, the whole body.
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        return hashlib.sha256(body).hexdigest()
    first = next((value[name] for name in ("messages", "input", "prompt") if value.get(name) is not None), None)
    if isinstance(first, list) and first and isinstance(first[0], dict):
        users = [place for place, one in enumerate(first) if isinstance(one, dict) and one.get("role") == "user"]
        first = first[: users[0] + 1] if users else first[:1]
    elif isinstance(first, (str, list)):
        first = first[:PREFIX]
    identity = [value.get("model"), value.get("instructions"), first]
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def ranked(key: str, replicas: Sequence[str]) -> list[int]:
    """Return the indices of the replicas for a key, the best one first.

    Args:
        key: key of a conversation.
        replicas: distinct names of replicas.
    """
    scores = [hashlib.sha256(f"{name} {key}".encode()).digest() for name in replicas]
    return sorted(range(len(replicas)), key=lambda place: scores[place], reverse=True)


class PrefixRouter(RequestRouter):  # type: ignore[misc, unused-ignore]
    """Router of a Ray Serve deployment whose requests have the key of their conversation as first argument."""

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Return the replicas in order of their scores; Serve takes the first one that has room."""
        key = str(pending_request.args[0]) if pending_request is not None and pending_request.args else ""
        order = ranked(key, [replica.replica_id.unique_id for replica in candidate_replicas])
        return [[candidate_replicas[place]] for place in order]
