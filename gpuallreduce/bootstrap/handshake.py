"""Mutual proof that both ends of a connection know the job's secret, before anything else is said.

Knows nothing of ranks. It proves who talks and hides nothing: use TCP on trusted networks only.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from typing import Any

from gpuallreduce.bootstrap.wire import Connection, Deadline, Malformed, Message, close_fds, encode
from gpuallreduce.errors import MismatchError

__all__ = ["HANDSHAKE_SECONDS", "PROTOCOL", "Doorkeeper", "Refused", "introduce"]

PROTOCOL = 1
HANDSHAKE_SECONDS = 5.0
_LIMIT_BYTES = 4096  # all that an unknown client can make us hold
_MAGIC = "gpuallreduce"


class Refused(MismatchError):
    """The other end does not belong to this job: another user, secret or protocol."""


def _proof(secret: bytes, role: str, nonces: str) -> str:
    # The role is part of it: a proof sent back to its maker proves nothing.
    return hmac.new(
        secret, f"{_MAGIC} {PROTOCOL} {role} {nonces}".encode(), hashlib.sha256
    ).hexdigest()


def _text(body: dict[str, Any], key: str) -> str:
    value = body.get(key)
    if not isinstance(value, str) or not value.isascii():
        raise Malformed(f"the handshake has no text under {key!r}")
    return value


def _plain(message: Message) -> dict[str, Any]:
    if message.fds:
        close_fds(message.fds)
        raise Malformed("descriptors came with the handshake")
    return message.body


def _check_user(connection: Connection) -> None:
    uid = connection.peer_uid()
    if uid is not None and uid != os.getuid():
        raise Refused(f"the other end runs as user {uid} and this process as user {os.getuid()}")


class Doorkeeper:
    """The listening side of one handshake; driven by ``advance``, so it never waits."""

    def __init__(self, connection: Connection, secret: bytes) -> None:
        """Greets the client.

        Raises:
            Refused: it runs as another user.
        """
        self.connection = connection
        self.deadline = Deadline.after(HANDSHAKE_SECONDS)
        self._secret = secret
        self._nonce = secrets.token_hex(16)
        self._trusted = False
        _check_user(connection)
        self._send({"greeting": _MAGIC, "protocol": PROTOCOL, "nonce": self._nonce})

    def advance(self) -> dict[str, Any] | None:
        """The first message of a client that has proved itself, once it is there.

        Raises:
            Refused, Malformed, ConnectionLost: drop this client.
        """
        while (message := self.connection.advance(limit_bytes=_LIMIT_BYTES)) is not None:
            body = _plain(message)
            if self._trusted:
                return body
            self._check(body)
        return None

    def _check(self, body: dict[str, Any]) -> None:
        nonces = f"{self._nonce} {_text(body, 'nonce')}"
        if not hmac.compare_digest(_text(body, "proof"), _proof(self._secret, "client", nonces)):
            self._send({"refused": "the secret differs"})
            raise Refused("a client did not know the secret")
        self._trusted = True
        self._send({"proof": _proof(self._secret, "server", nonces)})

    def _send(self, body: dict[str, Any]) -> None:
        # A handshake is smaller than any socket buffer: if it does not fit, drop the client.
        self.connection.send(encode(body), deadline=Deadline.after(0), awaiting="a new client")


def introduce(connection: Connection, secret: bytes, *, deadline: Deadline) -> None:
    """The connecting side: proves that we know the secret and that the other end does.

    Raises:
        Refused: another user, secret or protocol version; trying again cannot help.
        Malformed, ConnectionLost, Timeout: no handshake came about.
    """
    _check_user(connection)
    deadline = deadline.within(HANDSHAKE_SECONDS)

    def receive(awaiting: str) -> dict[str, Any]:
        message = connection.recv(deadline=deadline, awaiting=awaiting, limit_bytes=_LIMIT_BYTES)
        return _plain(message)

    greeting = receive("the greeting of rank 0")
    if greeting.get("greeting") != _MAGIC:
        raise Malformed("another program listens there")
    if greeting.get("protocol") != PROTOCOL:
        raise Refused(
            f"rank 0 speaks bootstrap protocol {greeting.get('protocol')!r:.20} and this process "
            f"{PROTOCOL}: install one version of gpuallreduce everywhere"
        )
    nonce = secrets.token_hex(16)
    nonces = f"{_text(greeting, 'nonce')} {nonce}"
    proof = encode({"nonce": nonce, "proof": _proof(secret, "client", nonces)})
    connection.send(proof, deadline=deadline, awaiting="rank 0 to take our proof")
    answer = receive("the proof of rank 0")
    if "refused" in answer or not hmac.compare_digest(
        _text(answer, "proof"), _proof(secret, "server", nonces)
    ):
        raise Refused(
            "this process and the one that listens have different secrets: give all ranks the same "
            "GPUALLREDUCE_SECRET or secret=, and every job an address of its own"
        )
