"""Tokens of service accounts, checked against the keys of their issuer."""

from __future__ import annotations

import json
import logging
import re
from threading import Lock
from typing import TYPE_CHECKING

import jwt

from memd.owner import OWN_TENANT
from memd.refusal import Refused, StatusCode

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger(__name__)

# Signatures only: a shared secret would let who checks tokens make them.
_ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "EdDSA")
_SERVICE_ACCOUNT = "system:serviceaccount:"
_CLAIMS = ("exp", "iat", "iss", "aud", "sub")
_LEEWAY_S = 10.0
# It stands in front of a job's name, with a slash behind it. An own subject has no colon, which
# those of service accounts have.
_ACCOUNT = re.compile(r"[a-z0-9][a-z0-9.-]{0,62}:[a-z0-9][a-z0-9.-]{0,62}")
_SUBJECT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}")


class TokenKeys:
    """Keys of a JWKS file, which is read anew when it changes: issuers exchange their keys. Any
    thread may call it."""

    def __init__(self, path: Path, *, issuer: str, audience: str) -> None:
        """Refused where the file holds no keys."""
        self._path = path
        self._issuer = issuer
        self._audience = audience
        self._lock = Lock()
        self._stamp: tuple[int, int] | None = None
        # The file that a warning was about; (0, 0): it cannot be looked at.
        self._bad_stamp: tuple[int, int] | None = None
        self._keys: jwt.PyJWKSet | None = None
        self._current()

    def tenant_of(self, token: str) -> str:
        """Namespace and name of the service account, or another issuer's subject. Refused says why
        the token is not good; it is shown to nobody."""
        try:
            key = self._key(jwt.get_unverified_header(token).get("kid"))
            claims = jwt.decode(
                token,
                key,
                algorithms=list(_ALGORITHMS),
                audience=self._audience,
                issuer=self._issuer,
                leeway=_LEEWAY_S,
                options={"require": list(_CLAIMS)},
            )
        except jwt.PyJWTError as error:
            raise self._not_good(str(error)) from error
        subject = str(claims["sub"])
        if subject.startswith(_SERVICE_ACCOUNT):
            account = subject.removeprefix(_SERVICE_ACCOUNT)
            if _ACCOUNT.fullmatch(account):
                return account
        elif _SUBJECT.fullmatch(subject) and subject != OWN_TENANT:
            return subject
        raise self._not_good(
            "its subject is neither a service account nor 1 to 64 letters, digits and any of . _ "
            "@ + -"
        )

    def _key(self, key_id: object) -> jwt.PyJWK:
        keys = self._current().keys
        if key_id is None and len(keys) == 1:
            return keys[0]
        for key in keys:
            if key.key_id == key_id:
                return key
        raise self._not_good(f"none of the keys of {self._path} signed it")

    def _current(self) -> jwt.PyJWKSet:
        with self._lock:
            stamp = (0, 0)
            try:
                status = self._path.stat()
                stamp = (status.st_mtime_ns, status.st_ino)
                if self._keys is None or stamp != self._stamp:
                    table = json.loads(self._path.read_text(encoding="utf-8"))
                    self._keys = jwt.PyJWKSet.from_dict(table)
                    self._stamp = stamp
                self._bad_stamp = None
            except (OSError, ValueError, AttributeError, jwt.PyJWTError) as error:
                if self._keys is None:
                    raise Refused(
                        StatusCode.INVALID_ARGUMENT,
                        f"token_keys: {self._path} is no JWKS file with public keys: {error}; "
                        "`kubectl get --raw /openid/v1/jwks` writes the cluster's",
                    ) from error
                # It may be being exchanged: those of before still hold.
                if stamp != self._bad_stamp:
                    self._bad_stamp = stamp
                    log.warning(
                        "token_keys cannot be read; the keys that were read before still hold",
                        extra={"path": str(self._path), "reason": str(error)},
                    )
            return self._keys

    def _not_good(self, reason: str) -> Refused:
        return Refused(
            StatusCode.PERMISSION_DENIED,
            f"the token of this process is not good: {reason}; it has to be a projected token of a "
            f"service account with audience {self._audience!r}, of issuer {self._issuer!r}",
        )
