"""Callers of an OpenID Connect issuer: tokens that it signed, whose claims say who asks and in which role.

Needs joserfc, the JOSE library of Authlib (`pip install 'fairpate[oidc]'`).

Nothing in a token is believed before its signature holds, under a key that the issuer publishes now and by an algorithm
that is named in the configuration. The token's header chooses among those keys and must not name a type for another
use; no key, address or certificate in it is looked at. Only algorithms with a public key can be configured, so `none`
and a public key that is used as a shared secret are refused whatever the header says.

A caller's name follows from issuer and subject, and from nothing that a person may choose for itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import json
import logging
import re
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import httpx
from pydantic import Field, field_validator

from aggregator.service.tokens import OIDC_PREFIX, Caller, Role
from fairpate.config import Section

Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
_REFRESH_S, _RETRY_S, _BELIEVED_S = 300.0, 10.0, 3600.0
"""Keys are read again after five minutes, for an unknown one at most every ten seconds, and believed for an hour."""
_TIMEOUT_S, _MAX_BYTES, _MAX_TOKEN, _MAX_SUBJECT = 5.0, 2**20, 12_000, 255
_ACCESS_TYPES = ("jwt", "at+jwt")
"""RFC 7519, 5.1, and RFC 9068, 2.1; in any letters."""
_log = logging.getLogger(__name__)


class OidcConfig(Section):
    """Whose tokens are good, for whom they must be made out, and what their claims mean."""

    issuer: str = Field(description="As the claim `iss` has it: https, or http on this machine.")
    audience: Annotated[str, Field(min_length=1)] = Field(description="Must be one of the claim `aud`.")
    roles_claim: Annotated[str, Field(min_length=1)] = Field(
        "roles", description="A list, or words; `a.b` for one in another."
    )
    analyst: Annotated[str, Field(min_length=1)] = Field("fairpate-analyst", description="The role of analysts.")
    operator: Annotated[str, Field(min_length=1)] = Field("fairpate-operator", description="That of operators.")
    algorithms: Annotated[tuple[Algorithm, ...], Field(min_length=1)] = Field(("RS256",), description="Allowed ones.")
    leeway_s: Annotated[int, Field(ge=0, le=300)] = Field(60, description="How far clocks may be apart, in seconds.")

    @field_validator("issuer")
    @classmethod
    def _is_trusted(cls, issuer: str) -> str:
        require_private_way(issuer)
        return issuer


def require_private_way(url: str) -> None:
    """ValueError for an address whose answer others could write: anything but https, or http on this machine."""
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ValueError(f"Expected an https:// address, got {url!r} ({error})") from error
    if parts.scheme == "https" and parts.host:
        return
    if parts.scheme != "http" or not (parts.host == "localhost" or _is_loopback(parts.host)):
        raise ValueError(f"Expected an https:// address, got {url!r}")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Keys:
    """The keys that an issuer publishes, as they were last read."""

    def __init__(self, issuer: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._issuer, self._clock = issuer, clock
        self._keys: Sequence[Any] = ()
        self._read_s = self._tried_s = float("-inf")

    def key(self, kid: object) -> Any | None:
        """The one key of that name, or the only one for a token that names none; None without, or if all are old."""
        if self._clock() - self._read_s > _BELIEVED_S:
            return None
        found = [key for key in self._keys if kid is None or key.kid == kid]
        return found[0] if len(found) == 1 else None

    def are_due(self, kid: object) -> bool:
        """Whether to read them again for the sake of a token with this key."""
        pause_s = _RETRY_S if self.key(kid) is None else _REFRESH_S
        return self._clock() - self._tried_s >= pause_s

    def read(self) -> None:
        """Read them again; where that fails, those of before are believed until their hour is over."""
        # Before the answer: an issuer that fails or hangs is not asked at every request.
        self._tried_s = self._clock()
        try:
            found = _get_json(f"{self._issuer.rstrip('/')}/.well-known/openid-configuration")
            # Else one issuer could hand out the keys of another (OpenID Connect Discovery 1.0, 4.3).
            if found.get("issuer") != self._issuer:
                raise ValueError("it says that it is another issuer")  # noqa: TRY301 - one answer for all
            require_private_way(found["jwks_uri"])
            self._keys = _public_keys(_get_json(found["jwks_uri"])["keys"])
            self._read_s = self._tried_s
        except Exception as error:  # noqa: BLE001 - whatever an issuer answers, the service goes on
            _log.error("The keys of %s cannot be read (%s); nobody new of it may be admitted.", self._issuer, error)


def _get_json(url: str) -> dict[str, Any]:
    # Where an answer leads elsewhere nobody has looked whether the way there is private.
    with httpx.stream("GET", url, timeout=_TIMEOUT_S, follow_redirects=False) as answer:
        if answer.status_code != 200:
            raise ValueError(f"status {answer.status_code}")
        body = b""
        for piece in answer.iter_bytes():
            body += piece
            if len(body) > _MAX_BYTES:
                raise ValueError("too long")
    found = json.loads(body)
    if not isinstance(found, dict):
        raise TypeError("no object")
    return found


def _public_keys(published: Sequence[dict[str, Any]]) -> list[Any]:
    """Keys to verify signatures with; those of another kind, a secret shared by two above all, are left out."""
    from joserfc.errors import JoseError
    from joserfc.jwk import import_key

    keys = []
    for values in published:
        if values.get("kty") in ("RSA", "EC", "OKP") and values.get("use", "sig") == "sig":
            try:
                keys.append(import_key(values))
            except (JoseError, ValueError, TypeError) as error:
                _log.warning("A key of the issuer cannot be used: %s", error)
    return keys


class Issuer:
    """Whose a token of an issuer is. From one event loop; :meth:`prepare` before :meth:`caller`."""

    def __init__(self, config: OidcConfig, keys: Keys | None = None) -> None:
        self._config, self._keys = config, keys or Keys(config.issuer)
        self._reading: asyncio.Task[None] | None = None

    async def prepare(self, token: str) -> None:
        """Read the issuer's keys again where that is due; only who comes with an unknown key waits for it."""
        if not looks_like_jwt(token):
            return
        kid = _kid(token)
        if self._keys.are_due(kid) and (self._reading is None or self._reading.done()):
            self._reading = asyncio.create_task(asyncio.to_thread(self._keys.read))
        if self._reading is not None and self._keys.key(kid) is None:
            # A caller that goes away must not end the reading for those who wait with it.
            await asyncio.shield(self._reading)

    def caller(self, token: str | None) -> Caller | None:
        """Who sent it; None unless everything about it holds."""
        from joserfc import jwt

        if token is None or not looks_like_jwt(token):
            return None
        try:
            key = self._keys.key(_kid(token))
            if key is None:
                return None
            decoded = jwt.decode(token, key, algorithms=list(self._config.algorithms))
            self._claims().validate(decoded.claims)
            return self._caller_of(decoded.claims) if _is_for_access(decoded.header.get("typ")) else None
        except Exception:  # noqa: BLE001 - whatever it is, it is nobody's token
            return None

    def _claims(self) -> Any:
        from joserfc.jwt import JWTClaimsRegistry

        return JWTClaimsRegistry(
            leeway=self._config.leeway_s,
            iss={"essential": True, "value": self._config.issuer},
            aud={"essential": True, "value": self._config.audience},
            exp={"essential": True},
            sub={"essential": True},
        )

    def _caller_of(self, claims: dict[str, Any]) -> Caller | None:
        role, subject = self._role(claims), claims["sub"]
        if role is None or len(subject) > _MAX_SUBJECT:
            return None
        return Caller(name=name_of(self._config.issuer, subject), role=role, expires_s=float(claims["exp"]))

    def _role(self, claims: dict[str, Any]) -> Role | None:
        roles = _roles(claims, self._config.roles_claim)
        if self._config.operator in roles:
            return "operator"
        return "analyst" if self._config.analyst in roles else None


def name_of(issuer: str, subject: str) -> str:
    """The name under which an issuer's subject is charged: another for every pair, with the subject's letters in it."""
    # As JSON, in which no pair is spelt like another.
    digest = hashlib.sha256(json.dumps([issuer, subject]).encode()).hexdigest()[:32]
    # At most 62 characters, where `NAME` has room for 64.
    word = re.sub(r"[^A-Za-z0-9._-]", "", subject)[:24]
    return f"{OIDC_PREFIX}{word}-{digest}"


def looks_like_jwt(token: str) -> bool:
    """Whether it is worth a look: three parts, and no longer than any real one."""
    return token.count(".") == 2 and len(token) <= _MAX_TOKEN


def _kid(token: str) -> object:
    """Which key the token says that it is signed with; nothing else of its header is read."""
    from joserfc.jws import extract_compact

    try:
        return extract_compact(token.encode()).headers().get("kid")
    except Exception:  # noqa: BLE001 - whatever it is, it is no token
        # No key has this name, where None would choose an issuer's only one.
        return ""


def _is_for_access(typ: object) -> bool:
    """Whether a token of this type may say who asks: an issuer signs others too, such as those that end a session."""
    if typ is None:
        return True
    return isinstance(typ, str) and typ.lower().removeprefix("application/") in _ACCESS_TYPES


def _roles(claims: dict[str, Any], path: str) -> Sequence[str]:
    found: Any = claims
    # Issuers name claims of their own by addresses, which have dots in them.
    for part in (path,) if path in claims else path.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    if isinstance(found, str):
        return found.split()
    return [role for role in found if isinstance(role, str)] if isinstance(found, list) else []
