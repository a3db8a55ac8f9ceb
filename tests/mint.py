"""An issuer of tokens, as a cluster's API server is one: its keys in a JWKS file, and what it
signs."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from typing import TYPE_CHECKING, Any

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

from memd.tokens import TokenKeys

if TYPE_CHECKING:
    from pathlib import Path

ISSUER = "https://kubernetes.default.svc.cluster.local"
AUDIENCE = "memd"


class Issuer:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._generation = 0
        self.exchange_keys()

    def exchange_keys(self) -> None:
        self._generation += 1
        self._rsa = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self._ec = ec.generate_private_key(ec.SECP256R1())
        keys: list[dict[str, Any]] = [
            RSAAlgorithm.to_jwk(self._rsa.public_key(), as_dict=True) | {"alg": "RS256"},
            ECAlgorithm.to_jwk(self._ec.public_key(), as_dict=True) | {"alg": "ES256"},
        ]
        for key, name in zip(keys, ("RS256", "ES256"), strict=True):
            key |= {"kid": self._key_id(name), "use": "sig"}
        written = self.path.with_suffix(".new")
        written.write_text(json.dumps({"keys": keys}))
        written.replace(self.path)

    def keys(self) -> TokenKeys:
        return TokenKeys(self.path, issuer=ISSUER, audience=AUDIENCE)

    def token(
        self,
        subject: str,
        *,
        algorithm: str = "RS256",
        headers: dict[str, str] | None = None,
        **changes: Any,
    ) -> str:
        """A claim that is None is left out."""
        key = self._rsa if algorithm == "RS256" else self._ec
        headers = headers or {"kid": self._key_id(algorithm)}
        return jwt.encode(self._claims(subject, **changes), key, algorithm, headers=headers)

    def unsigned(self, subject: str) -> str:
        headers = {"kid": self._key_id("RS256")}
        return jwt.encode(self._claims(subject), "", "none", headers=headers)

    def signed_with_the_public_key(self, subject: str) -> str:
        """What everybody can make who takes the public key for a shared secret."""
        public = self._rsa.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        header = {"alg": "HS256", "typ": "JWT", "kid": self._key_id("RS256")}
        signed = ".".join(_packed(json.dumps(each)) for each in (header, self._claims(subject)))
        return f"{signed}.{_packed(hmac.digest(public, signed.encode(), hashlib.sha256))}"

    def _claims(self, subject: str, **changes: Any) -> dict[str, Any]:
        now = time.time()
        claims = {
            "iss": ISSUER,
            "aud": [AUDIENCE],
            "sub": subject,
            "iat": int(now),
            "nbf": int(now),
            "exp": int(now) + 3600,
            **changes,
        }
        return {name: value for name, value in claims.items() if value is not None}

    def _key_id(self, name: str) -> str:
        return f"{name}-{self._generation}"


def _packed(data: str | bytes) -> str:
    raw = data.encode() if isinstance(data, str) else data
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
