"""Who may ask: tokens and their store, OpenID Connect, rates per caller.

How many requests per second one caller may send: a bucket each, in memory, full at the start.

A request with a token of this service counts for its caller; any other counts for its address, so that guessing tokens
is slow and nobody else waits for it. Few addresses are remembered, those of late.

Who is asking: bearer tokens for two roles, compared in constant time.

Tokens come from the environment or from files when a service starts, and from the token store of its run, which may
change while it runs (:mod:`aggregator.service.auth`). Only digests of tokens are kept, so that a token is in no
process list, actor argument, log line or traceback. Without any token the service is for this machine alone, and for
analysts alone: what an operator may see needs a token always.

Callers of an OpenID Connect issuer: tokens that it signed, whose claims say who asks and in which role.

Needs joserfc, the JOSE library of Authlib (`pip install 'fairpate[oidc]'`).

Nothing in a token is believed before its signature holds, under a key that the issuer publishes now and by an algorithm
that is named in the configuration. The token's header chooses among those keys and must not name a type for another
use; no key, address or certificate in it is looked at. Only algorithms with a public key can be configured, so `none`
and a public key that is used as a shared secret are refused whatever the header says.

A caller's name follows from issuer and subject, and from nothing that a person may choose for itself.

The token store of a run: whose tokens are good, until when, and what each name may spend.

One file of the operator's (mode 0600), written whole or not at all, changed while the run is served, and read again by
the service as soon as it changed. It holds SHA-256 digests of tokens that were made here from 256 random bits, so that
nothing in it opens anything. Changes are pure functions of what the store holds; :func:`change` applies one under a
lock on the folder. A store that cannot be read admits nobody.

In front of every route: which host is asked for, who asks, and how large a body may be.

Pure ASGI, so that the body of an unknown caller, or one that is too large, is never read: its length must be declared.
Large bodies are read and parsed in turns, with a pause before each in proportion to its size, so that requests beside
them go on. Every path but the open ones needs a token once one is
configured; without tokens only this machine's own names are served, which also keeps web pages from reaching the
service through a name of theirs (DNS rebinding).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import json
import logging
import math
import os
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import httpx
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator
from starlette.types import ASGIApp, Receive, Scope, Send

from aggregator.ledger import NO_LIMIT, OwnLimit
from aggregator.sqlite import folder_held
from fairpate.config import Section
from fairpate.config_reader import expected
from fairpate.files import write_atomically
from fairpate.request_faults import FaultError, declared_length, read_body, with_body
from fairpate.types import UsageError

_MOST_BUCKETS = 4096


@dataclass(frozen=True, kw_only=True)
class RequestRate:
    """``per_s`` requests per second, and ``burst`` at once; inf: no limit. ValueError for a rate that lets none in."""

    per_s: float = math.inf
    burst: float = math.inf

    def __post_init__(self) -> None:
        if not self.per_s > 0 or not self.burst >= 1:
            raise ValueError(f"Expected per_s > 0 and burst >= 1, got {self.per_s} and {self.burst}.")


STRANGERS = RequestRate(per_s=2.0, burst=20.0)
"""Of requests without a token that is known."""


class Buckets:
    """What everybody may still send under one rule."""

    def __init__(self, rule: RequestRate) -> None:
        self._rule = rule
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, name: str, *, now_s: float) -> float:
        """0 and one request less in ``name``'s bucket; or how long until there is one."""
        rule = self._rule
        if math.isinf(rule.per_s):
            return 0.0
        # Taken out and put back behind all others, so that the first is the one not heard of for longest.
        level, filled_s = self._levels.pop(name, (rule.burst, now_s))
        level = min(rule.burst, level + (now_s - filled_s) * rule.per_s)
        taken = level >= 1
        self._levels[name] = (level - taken, now_s)
        if len(self._levels) > _MOST_BUCKETS:
            self._levels.popitem(last=False)
        return 0.0 if taken else (1 - level) / rule.per_s


Role = Literal["analyst", "operator"]
MIN_TOKEN_CHARACTERS = 24
NAME = r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}"
OIDC_PREFIX = "oidc-"
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]", "::1")


class TokenError(UsageError, ValueError):
    """A token that cannot be used; the message names where it came from and the remedy, never the token."""


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Who sent a request. Those of one ``name`` share what they may spend. ``expires_s``: since 1970; None: never."""

    name: str
    role: Role
    expires_s: float | None = None

    def __post_init__(self) -> None:
        if self.role not in ("analyst", "operator"):
            raise ValueError(f"Expected a role of analyst or operator, got {self.role}.")


LOCAL_ANALYST = Caller(name="local", role="analyst")


@dataclass(frozen=True, kw_only=True)
class TokenBook:
    """Every token's SHA-256 digest and whose it is; empty where none is configured. ``store``: where more may lie;
    ``oidc``: whose signed tokens are good besides.

    Beside the store lies a mark once a token was asked for, so that a store that is lost opens nothing, also after a
    restart.
    """

    entries: tuple[tuple[bytes, Caller], ...] = ()
    store: Path | None = None
    oidc: OidcConfig | None = None

    def __post_init__(self) -> None:
        if len({digest for digest, _ in self.entries}) != len(self.entries):
            raise TokenError("Expected different tokens for different callers, got one token twice; make another.")

    @property
    def is_empty(self) -> bool:
        """Whether no token is configured and none ever was; a store asks for tokens whatever it holds."""
        stored = self.store is not None and any(map(os.path.lexists, (self.store, mark(self.store))))
        return not (self.entries or self.oidc or stored)

    def caller(self, token: str | None) -> Caller | None:
        """Whose ``token`` this is. Every entry is compared, whole, whichever matches: the time tells nothing."""
        offered, found, now_s = token_digest(token or ""), None, time.time()
        for digest, caller in self.entries:
            if hmac.compare_digest(digest, offered) and (caller.expires_s is None or now_s < caller.expires_s):
                found = caller
        return found if token else None


def read_tokens(
    environment: Mapping[str, str],
    *,
    analyst_file: Path | None = None,
    operator_file: Path | None = None,
) -> TokenBook:
    """Tokens from files, or from FAIRPATE_ANALYST_TOKEN and FAIRPATE_OPERATOR_TOKEN for a role without a file.

    A file holds one token per line, each with a name in front of it or without: then it is called by its role and its
    line. TokenError for a token shorter than 24 characters, a token given twice, or a file that others than its owner
    may read.
    """
    entries: list[tuple[bytes, Caller]] = []
    sources: tuple[tuple[Role, Path | None], ...] = (("analyst", analyst_file), ("operator", operator_file))
    for role, path in sources:
        variable = f"FAIRPATE_{role.upper()}_TOKEN"
        if path is not None:
            entries += _parse(read_private(path), role, str(path))
        elif environment.get(variable):
            entries += _parse(environment[variable], role, variable)
    return TokenBook(entries=tuple(entries))


def mark(store: Path) -> Path:
    """The file that says that tokens are needed, whatever becomes of the store beside it."""
    return store.with_suffix(".needed")


def is_loopback(host: str) -> bool:
    """Whether ``host`` is reached from this machine only. A name other than localhost counts as not."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_name(name: str, source: str) -> None:
    """TokenError for a name that is not a plain word, which the ledger, logs and a terminal can all hold.

    And for one that others are charged under: who needs no token, or comes with one of an OpenID Connect issuer.
    """
    if not re.fullmatch(NAME, name):
        raise TokenError(f"{source}: expected a name of at most 64 letters, digits, '.', '_', '@' and '-'.")
    if name == LOCAL_ANALYST.name or name.startswith(OIDC_PREFIX):
        raise TokenError(
            f"{source}: '{LOCAL_ANALYST.name}' and names that begin with '{OIDC_PREFIX}' are those of callers without "
            "a token of this service; give another name."
        )


def token_digest(token: str) -> bytes:
    """What is kept of a token."""
    # A token of bytes that are no text is nobody's, and no error.
    # No slow hash: one is taken at every request, and tokens are longer than what can be guessed.
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def read_private(path: Path) -> str:
    """The text of a file with tokens. TokenError where it cannot be read, or others than its owner may."""
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise TokenError(
            f"{path}: cannot be read as a token file ({reason}); give the file with the tokens."
        ) from error
    if os.name == "posix" and mode & 0o077:
        raise TokenError(f"{path}: others may read it (mode {mode & 0o777:o}); run `chmod 600 {path}`.")
    return text


def _parse(text: str, role: Role, source: str) -> list[tuple[bytes, Caller]]:
    rows = [line.split() for line in text.splitlines() if line.strip()]
    if not rows:
        raise TokenError(f"{source}: holds no token; write one of at least {MIN_TOKEN_CHARACTERS} characters.")
    return [_entry(row, role, f"{source}, line {number}", f"{role}-{number}") for number, row in enumerate(rows, 1)]


def _entry(row: Sequence[str], role: Role, source: str, name: str) -> tuple[bytes, Caller]:
    if len(row) not in (1, 2):
        raise TokenError(f"{source}: expected `token` or `name token`, got {len(row)} words.")
    token = row[-1]
    if len(token) < MIN_TOKEN_CHARACTERS:
        raise TokenError(
            f"{source}: expected a token of at least {MIN_TOKEN_CHARACTERS} characters, got {len(token)}; "
            "make one with `openssl rand -hex 32`."
        )
    if len(row) == 2:
        name = row[0]
        check_name(name, source)  # not shown: it may be a token that was put in its place
    return token_digest(token), Caller(name=name, role=role)


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


FORMAT: Literal["fairpate.tokens/1"] = "fairpate.tokens/1"
Name = Annotated[str, StringConstraints(pattern=f"^{NAME}$")]
_LOOK_EVERY_S = 0.5

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, kw_only=True)
class StoredToken:
    """One token's digest, and whose it is. Seconds since 1970; ``expires_s`` None: never."""

    name: Name
    role: Role
    sha256: Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]
    created_s: float
    expires_s: float | None = None

    def is_good(self, now_s: float) -> bool:
        """Whether it admits its caller now."""
        return self.expires_s is None or now_s < self.expires_s


class _File(BaseModel):
    """The store as it is written, every type checked."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    format: Literal["fairpate.tokens/1"] = FORMAT
    tokens: tuple[StoredToken, ...]
    limits: dict[Name, OwnLimit]


@dataclass(frozen=True, kw_only=True)
class TokenStore:
    """The tokens of a run, ended ones until the next change, and the limits of their names."""

    tokens: tuple[StoredToken, ...] = ()
    limits: Mapping[str, OwnLimit] = field(default_factory=dict)

    @property
    def book(self) -> TokenBook:
        """The tokens as a service looks them up."""
        return TokenBook(
            entries=tuple(
                (bytes.fromhex(t.sha256), Caller(name=t.name, role=t.role, expires_s=t.expires_s)) for t in self.tokens
            )
        )

    def of(self, name: str) -> tuple[StoredToken, ...]:
        """The tokens of ``name``. TokenError if it has none."""
        found = tuple(token for token in self.tokens if token.name == name)
        if not found:
            known = ", ".join(sorted({token.name for token in self.tokens})) or "none yet"
            raise TokenError(f"{name}: has no token here that is good; add one, or give one of: {known}.")
        return found

    def without_ended(self, now_s: float) -> TokenStore:
        """The store without the tokens that ended: nothing makes one of them good again."""
        return replace(self, tokens=tuple(token for token in self.tokens if token.is_good(now_s)))


def added(
    store: TokenStore,
    name: str,
    *,
    role: Role,
    limit: OwnLimit,
    expires_s: float | None,
    now_s: float,
    before: OwnLimit = NO_LIMIT,
) -> tuple[TokenStore, str]:
    """The store with a new token for a new ``name``, and the token. TokenError for a name that is taken or unfit.

    ``before``: the limit that the name is known to have where the store knows none.
    """
    check_name(name, repr(name))
    if any(token.name == name for token in store.tokens):
        raise TokenError(f"{name}: has a token already; rotate it, or give another name.")
    store, token = _with_new_token(store, name, role=role, expires_s=expires_s, now_s=now_s)
    # A name that was here before keeps its limits, but for those that are stated: a new token must not lift them.
    given = {kind: value for kind, value in asdict(limit).items() if value is not None}
    before = store.limits.get(name, before)
    return (limited(store, name, replace(before, **given)) if given else store), token


def rotated(store: TokenStore, name: str, *, old_expires_s: float, now_s: float) -> tuple[TokenStore, str]:
    """The store with another token for ``name``, and the token; those before end at ``old_expires_s``, or sooner."""
    newest = store.of(name)[-1]
    store = replace(store, tokens=tuple(_by(t, old_expires_s) if t.name == name else t for t in store.tokens))
    return _with_new_token(store, name, role=newest.role, expires_s=newest.expires_s, now_s=now_s)


def expired(store: TokenStore, name: str, *, expires_s: float | None) -> TokenStore:
    """The store in which the newest token of ``name`` ends at ``expires_s``, and those before it then or sooner."""
    newest = store.of(name)[-1]

    def ending(token: StoredToken) -> StoredToken:
        if token.name != name:
            return token
        # One that was rotated out lasts no longer for it: it may have leaked.
        return replace(token, expires_s=expires_s) if token is newest else _by(token, expires_s)

    return replace(store, tokens=tuple(map(ending, store.tokens)))


def _by(token: StoredToken, expires_s: float | None) -> StoredToken:
    """The token, which ends at ``expires_s`` at the latest."""
    return token if expires_s is None or not token.is_good(expires_s) else replace(token, expires_s=expires_s)


def limited(store: TokenStore, name: str, limit: OwnLimit) -> TokenStore:
    """The store in which ``name`` has this limit: one with a token here, or with one of an OpenID Connect issuer."""
    if not (name.startswith(OIDC_PREFIX) and re.fullmatch(NAME, name)):
        store.of(name)
    return replace(store, limits={**store.limits, name: limit})


def revoked(store: TokenStore, name: str) -> TokenStore:
    """The store without the tokens of ``name``; its limit stays."""
    store.of(name)
    return replace(store, tokens=tuple(token for token in store.tokens if token.name != name))


def _with_new_token(
    store: TokenStore, name: str, *, role: Role, expires_s: float | None, now_s: float
) -> tuple[TokenStore, str]:
    token = secrets.token_hex(32)
    stored = StoredToken(
        name=name, role=role, sha256=token_digest(token).hex(), created_s=round(now_s), expires_s=expires_s
    )
    return replace(store, tokens=(*store.tokens, stored)), token


def read_store(path: Path) -> TokenStore:
    """The store at ``path``. TokenError where it cannot be read, is damaged, or others than its owner may read it."""
    text = read_private(path)
    try:
        found = _File.model_validate_json(text)
        store = TokenStore(tokens=found.tokens, limits=found.limits)
        # Built for its check: one token under two names is damage.
        _ = store.book
    except ValueError as error:
        raise TokenError(f"{path}: is damaged ({_damage(error)}); restore it, or remove it and add tokens.") from error
    return store


def _damage(error: ValueError) -> str:
    """What is wrong, without what the file holds."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, first['loc'])) or 'the whole'}: {expected(first)}"
    return str(error)


def change(path: Path, function: Callable[[TokenStore], tuple[TokenStore, ResultT]]) -> ResultT:
    """Put what ``function`` makes of the store, without what ended, in its place. Errors as :func:`read_store`.

    One process at a time.
    """
    with folder_held(path, create=False):
        before = read_store(path) if os.path.lexists(path) else TokenStore()
        # Before the store: a crash in between asks for tokens that nobody has, and never for none.
        _make_mark(path)
        store, result = function(before.without_ended(time.time()))
        write_atomically(path, lambda unfinished: _write(unfinished, store), private=True)
    return result


def _make_mark(store: Path) -> None:
    """Note, durably, that tokens are needed from now on."""
    if not os.path.lexists(mark(store)):
        write_atomically(mark(store), lambda unfinished: unfinished.touch(mode=0o600))


def _write(path: Path, store: TokenStore) -> None:
    values = {
        "format": FORMAT,
        "tokens": [asdict(token) for token in store.tokens],
        "limits": {name: asdict(limit) for name, limit in store.limits.items()},
    }
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def _issuer_of(book: TokenBook) -> Issuer | None:
    if book.oidc is None:
        return None

    return Issuer(book.oidc)


class LiveTokens:
    """Who may ask a service now: the tokens it was started with, and those of its store as the file is now.

    Once a token was asked for, one is needed for ever, also after a restart: a store that is emptied or lost opens
    nothing.
    """

    def __init__(self, book: TokenBook) -> None:
        self._book, self._stored = book, TokenStore()
        self._stored_book = self._stored.book
        self._seen: tuple[int, ...] | None = None
        self._look_again_s = 0.0
        self._issuer = _issuer_of(book)
        self._needs_token = False
        if not book.is_empty:
            self._need_token()

    @property
    def limits(self) -> Mapping[str, OwnLimit]:
        """The limits of the store, as they were last looked at."""
        return self._stored.limits

    def caller(self, token: str | None) -> Caller | None:
        """Whose ``token`` this is; None: nobody's. Where no token is needed everybody is the local analyst."""
        self._look()
        if not self._needs_token:
            return LOCAL_ANALYST
        stored, given = self._stored_book.caller(token), self._book.caller(token)
        return given or stored or (self._issuer.caller(token) if self._issuer else None)

    async def prepare(self, token: str) -> None:
        """Before :meth:`caller`: let the issuer of a signed token say which keys it has now."""
        if self._issuer is not None:
            await self._issuer.prepare(token)

    @property
    def needs_token(self) -> bool:
        """Whether callers must send a token."""
        self._look()
        return self._needs_token

    def _look(self) -> None:
        """Read the store if it changed."""
        now_s, path = time.monotonic(), self._book.store
        if path is None or now_s < self._look_again_s:
            return
        self._look_again_s = now_s + _LOOK_EVERY_S
        try:
            # Before it is read: one that is replaced in between is read again at the next look.
            found = path.stat()
            # Any of these: a store may be replaced within a tick of the clock, in its old size, or opened to others.
            seen = (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_mode)
            if seen == self._seen:
                return
            self._need_token()
            # Tokens were asked for just above: a store that is damaged, too, lets in nobody without one.
            self._seen = seen
            self._take(read_store(path))
        except FileNotFoundError:
            self._seen = None
            self._take(replace(self._stored, tokens=()))
        except Exception as error:  # noqa: BLE001 - whatever it is, what was good before may be so no more
            # The limits stay: nobody may spend more because a file cannot be read.
            _log.error("Nobody is admitted by the token store: %s", error)
            self._take(replace(self._stored, tokens=()))

    def _need_token(self) -> None:
        self._needs_token = True
        try:
            if self._book.store is not None:
                _make_mark(self._book.store)
        except OSError as error:
            _log.error("Tokens are needed, and after a restart without the token store they may not be: %s", error)

    def _take(self, store: TokenStore) -> None:
        self._stored, self._stored_book = store, store.book


_LARGE_BODY_BYTES = 64 * 2**10
_MAX_LARGE_BODIES = 16
_LARGE_BYTES_PER_S = 10e6
OPEN_PATHS = ("/", "/livez", "/readyz", "/healthz", "/docs", "/openapi.json")
OPERATOR_PREFIX = "/v1/operator/"


class Auth:
    """ASGI middleware; puts ``caller`` into ``scope["state"]``, and ``is_admitted``: whether it would be so now."""

    def __init__(
        self, app: ASGIApp, *, tokens: LiveTokens, max_body_bytes: int, rate: RequestRate, strangers: RequestRate
    ) -> None:
        self._app = app
        self._rates, self._strangers = Buckets(rate), Buckets(strangers)
        self._tokens = tokens
        self._max_body_bytes = max_body_bytes
        self._num_large = 0
        self._turn = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Admit the request, or answer it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        # The keys of an issuer may have to be fetched: awaited here, so that no lookup below blocks the loop.
        await self._tokens.prepare(_bearer(headers.get(b"authorization", "")) or "")
        try:
            caller = self._admit(scope, headers)
            length = self._body_bytes(headers)
        except FaultError as refused:
            await _respond(send, refused)
            return
        state = scope.setdefault("state", {})
        # Streams outlive their admission: they ask again, and end with a token that was revoked meanwhile.
        state["caller"], state["is_admitted"] = caller, lambda: self._is_still(caller, headers)
        if length > _LARGE_BODY_BYTES:
            await self._take_turn(length, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _admit(self, scope: Scope, headers: dict[bytes, str]) -> Caller:
        path: str = scope["path"]
        if not self._tokens.needs_token:
            _check_host(headers.get(b"host", ""))
        caller = self._caller(headers.get(b"authorization", ""))
        if path in OPEN_PATHS:
            return caller or LOCAL_ANALYST
        # Before the refusal below, so that guessing tokens is slowed down as well.
        self._slow_down(caller, scope)
        if caller is None:
            raise FaultError(401, "Authorization", "(not shown)", "Send a bearer token of this service.")
        if path.startswith(OPERATOR_PREFIX) and caller.role != "operator":
            raise FaultError(403, "Authorization", caller.role, "For operators; send the operator's token.")
        return caller

    def _slow_down(self, caller: Caller | None, scope: Scope) -> None:
        """FaultError for a request too many, of a caller or of an address that nobody knows."""
        if caller is not None:
            wait_s = self._rates.wait_s(caller.name, now_s=time.monotonic())
        else:
            wait_s = self._strangers.wait_s((scope.get("client") or ("",))[0], now_s=time.monotonic())
        if wait_s:
            remedy = f"Too many requests; wait {wait_s:.1f} s, or send several queries in one."
            raise FaultError(429, "requests", "too many", remedy, {"Retry-After": str(math.ceil(wait_s))})

    def _caller(self, authorization: str) -> Caller | None:
        return self._tokens.caller(_bearer(authorization))

    def _is_still(self, caller: Caller, headers: dict[bytes, str]) -> bool:
        now = self._caller(headers.get(b"authorization", ""))
        return now is not None and (now.name, now.role) == (caller.name, caller.role)

    def _body_bytes(self, headers: dict[bytes, str]) -> int:
        """The declared length of the body. FaultError if it may not be read."""
        length = declared_length(headers, self._max_body_bytes)
        # Refused before it is read: those that wait for their turn lie in memory.
        if length > _LARGE_BODY_BYTES and self._num_large >= _MAX_LARGE_BODIES:
            remedy = "Too many large requests at the same time; ask again later, or send fewer queries at once."
            raise FaultError(503, "body", f"{length} bytes", remedy, {"Retry-After": "2"})
        return length

    async def _take_turn(self, length: int, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the large body, wait, then pass the request on; what parses it does not wait before that."""
        self._num_large += 1
        try:
            # Outside the turn: a caller that sends slowly holds up nobody else.
            body = await read_body(receive)
            if body is not None:
                async with self._turn:
                    await asyncio.sleep(length / _LARGE_BYTES_PER_S)
                await self._app(scope, with_body(body, receive), send)
        finally:
            self._num_large -= 1


def _bearer(authorization: str) -> str | None:
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def _check_host(host: str) -> None:
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    if name.lower() not in LOOPBACK_NAMES:
        raise FaultError(400, "Host", host, "Without tokens only this machine is served; ask 127.0.0.1.")


async def _respond(send: Send, refused: FaultError) -> None:
    body = json.dumps({"errors": [refused.fault]}).encode()
    length = str(len(body)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", length)]
    headers += [(name.lower().encode(), value.encode()) for name, value in (refused.headers or {}).items()]
    if refused.status_code == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": refused.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": body})
