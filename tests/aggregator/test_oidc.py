"""Tokens of an OpenID Connect issuer, a real one on loopback with keys of its own; and all that is no token of it.

Keys, and most tokens, are made with cryptography alone, by the letters of RFC 7515.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from pydantic import ValidationError
from serving import ANALYST, OPERATOR, ids, running, tokens_of_both_roles

from aggregator.ledger import OwnLimit
from aggregator.service import auth
from aggregator.service.auth import (
    OidcConfig,
    RequestRate,
    TokenBook,
    TokenError,
    TokenStore,
    check_name,
    limited,
    name_of,
)

pytest.importorskip("joserfc", reason="needs `pip install 'fairpate[oidc]'`")
RSA = {kid: rsa.generate_private_key(65537, 2048) for kid in ("one", "two")}
CURVE = ec.generate_private_key(ec.SECP256R1())


def b64(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def part(value: object) -> str:
    return b64(json.dumps(value).encode())


def number(value: int, size: int | None = None) -> str:
    return b64(value.to_bytes(size or (value.bit_length() + 7) // 8, "big"))


def rsa_jwk(kid: str) -> dict[str, str]:
    public = RSA[kid].public_key().public_numbers()
    return {"kty": "RSA", "kid": kid, "use": "sig", "alg": "RS256", "n": number(public.n), "e": number(public.e)}


def ec_jwk(kid: str) -> dict[str, str]:
    public = CURVE.public_key().public_numbers()
    return {"kty": "EC", "kid": kid, "crv": "P-256", "x": number(public.x, 32), "y": number(public.y, 32)}


def pem(kid: str) -> bytes:
    return (
        RSA[kid].public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )


def rs256(message: bytes, kid: str = "one") -> bytes:
    return RSA[kid].sign(message, padding.PKCS1v15(), hashes.SHA256())


def es256(message: bytes) -> bytes:
    r, s = decode_dss_signature(CURVE.sign(message, ec.ECDSA(hashes.SHA256())))
    return r.to_bytes(32, "big") + s.to_bytes(32, "big")


def signed(header: dict[str, object], claims: object, sign=rs256) -> str:
    message = f"{part(header)}.{part(claims)}"
    return f"{message}.{b64(sign(message.encode()))}"


class IssuerServer:
    """Publishes what ``keys`` says, and counts how often it was asked."""

    def __init__(self) -> None:
        self.keys, self.asked, self.status, self.named = [rsa_jwk("one")], 0, 200, None
        parent = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found: object = {"keys": parent.keys}
                if self.path.endswith("/.well-known/openid-configuration"):
                    parent.asked += 1
                    found = {"issuer": parent.named or parent.url, "jwks_uri": f"{parent.url}/keys"}
                body = json.dumps(found).encode()
                self.send_response(parent.status)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Location", f"{parent.url}/elsewhere")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/realm"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def claims(self, **changed: object) -> dict[str, object]:
        now = int(time.time())
        told = {"iss": self.url, "aud": "fairpate", "sub": "u-17", "exp": now + 300, "iat": now}
        told |= {"roles": ["fairpate-analyst"]} | changed
        return {name: value for name, value in told.items() if value is not ...}

    def token(self, kid: str = "one", **changed: object) -> str:
        header = {"alg": "RS256", "kid": kid, "typ": "at+jwt"}
        return signed(header, self.claims(**changed), lambda message: rs256(message, kid))


@pytest.fixture
def issuer():
    server = IssuerServer()
    yield server
    server.server.shutdown()
    server.server.server_close()


@pytest.fixture
def service(issuer, tmp_path):
    """``service(**config)``: the URL of a service that knows the issuer and two tokens of its own."""
    with contextlib.ExitStack() as stack:

        def start(**config):
            known = OidcConfig(issuer=issuer.url, audience="fairpate", **config)
            book = TokenBook(entries=tokens_of_both_roles().entries, store=tmp_path / "tokens.json", oidc=known)
            # Strangers are slowed down elsewhere.
            patient = RequestRate(per_s=1000, burst=1000)
            return stack.enter_context(running(tmp_path / "ledger.sqlite", tokens=book, strangers=patient))

        yield start


def me(url: str, token: str) -> httpx.Response:
    return httpx.get(f"{url}/v1/me", headers={"Authorization": f"Bearer {token}"}, timeout=30)


def test_claims_say_who_asks_in_which_role_and_charges_are_kept_by_issuer_and_subject(issuer, service):
    url = service()
    told = me(url, issuer.token()).json()
    assert (told["name"], told["scope"]) == (name_of(issuer.url, "u-17"), "analyst")
    assert told["expires_s"] == pytest.approx(time.time() + 300, abs=5)
    for token, count in ((issuer.token(), 3), (issuer.token(sub="u-18"), 2), (issuer.token(exp=time.time() + 60), 1)):
        asked = httpx.post(
            f"{url}/v1/queries", json=ids(range(10 * count, 11 * count)), headers={"Authorization": f"Bearer {token}"}
        )
        assert asked.status_code == 200
    assert me(url, issuer.token()).json()["spent"]["queries"] == 3 + 1
    assert me(url, issuer.token(sub="u-18")).json()["spent"]["queries"] == 2
    ledger = f"{url}/v1/operator/ledger"
    operator = issuer.token(sub="root", roles="fairpate-analyst fairpate-operator")
    assert httpx.get(ledger, headers={"Authorization": f"Bearer {operator}"}).status_code == 200
    assert httpx.get(ledger, headers={"Authorization": f"Bearer {issuer.token()}"}).status_code == 403
    assert [me(url, token).json()["scope"] for token in (ANALYST, OPERATOR)] == ["analyst", "operator"]


def test_roles_may_lie_in_another_claim(issuer, service):
    url = service(roles_claim="realm_access.roles", analyst="ask")
    assert me(url, issuer.token(roles=..., realm_access={"roles": ["ask"]})).status_code == 200
    assert me(url, issuer.token()).status_code == 401


def hostile(issuer: IssuerServer) -> dict[str, str]:
    """What must be nobody's token, by what is wrong with it."""
    now, good = int(time.time()), issuer.token()
    head, body, signature = good.split(".")
    asked = {"alg": "RS256", "kid": "one"}

    def with_secret(secret: bytes):
        return lambda message: hmac.digest(secret, message, "sha256")

    by_header = {
        "none": signed({"alg": "none"}, issuer.claims(), lambda _: b""),
        "None, in capitals": signed({"alg": "NONE", "kid": "one"}, issuer.claims(), lambda _: b""),
        "no algorithm": signed({"kid": "one"}, issuer.claims()),
        "public key as a secret": signed({"alg": "HS256", "kid": "one"}, issuer.claims(), with_secret(pem("one"))),
        "modulus as a secret": signed(
            {"alg": "HS256", "kid": "one"}, issuer.claims(), with_secret(rsa_jwk("one")["n"].encode())
        ),
        "another algorithm than allowed": signed({"alg": "RS512", "kid": "one"}, issuer.claims()),
        "an algorithm that is none of the key's": signed({"alg": "ES256", "kid": "one"}, issuer.claims(), es256),
        "key in its header": signed(
            {"alg": "RS256", "kid": "two", "jwk": rsa_jwk("two")}, issuer.claims(), lambda m: rs256(m, "two")
        ),
        "address of keys in its header": signed(
            {"alg": "RS256", "kid": "two", "jku": f"{issuer.url}/keys"}, issuer.claims(), lambda m: rs256(m, "two")
        ),
        "another's key under a known name": signed(asked, issuer.claims(), lambda m: rs256(m, "two")),
        "a name that is a path": signed({"alg": "RS256", "kid": "../one"}, issuer.claims()),
        "a name that is no text": signed({"alg": "RS256", "kid": ["one"]}, issuer.claims()),
        "the end of a session": signed(asked | {"typ": "logout+jwt"}, issuer.claims()),
        "a type that is no text": signed(asked | {"typ": ["JWT"]}, issuer.claims()),
        "a critical header": signed(asked | {"crit": ["exp"], "exp": 1}, issuer.claims()),
    }
    by_claims = {
        "another issuer": {"iss": issuer.url + "/"},
        "no issuer": {"iss": ...},
        "another audience": {"aud": "fairpate-2"},
        "audiences without ours": {"aud": ["a", "b"]},
        "an audience that is no text": {"aud": {"fairpate": 1}},
        "no audience": {"aud": ...},
        "over": {"exp": now - 120},
        "no end": {"exp": ...},
        "an end that is no number": {"exp": str(now + 300)},
        "an end that is true": {"exp": True},
        "an end that is no time": {"exp": float("nan")},
        "an endless one": {"exp": float("inf")},
        "not yet": {"nbf": now + 120},
        "made in time to come": {"iat": now + 120},
        "nobody": {"sub": ...},
        "an empty subject": {"sub": ""},
        "a subject that is no text": {"sub": 17},
        "a subject without end": {"sub": "u" * 300},
        "no role": {"roles": []},
        "a role that holds ours": {"roles": ["not-fairpate-analyst"]},
        "roles of another shape": {"roles": {"fairpate-analyst": True}},
    }
    whole = {
        "unsigned": f"{head}.{body}.",
        "two parts": f"{head}.{body}",
        "four parts": f"{good}.{signature}",
        "another body": f"{head}.{part(issuer.claims(roles=['fairpate-operator']))}.{signature}",
        "no JSON": f"{head}.{b64(b'[1')}.{signature}",
        "a list": signed(asked, [1]),
        "many parts": good + "." * 9,
        "deep JSON": f"{b64(b'[' * 5000)}.{body}.{signature}",
        "long": f"{head}.{'A' * 13_000}.{signature}",
        "not of this alphabet": f"{head}.{body}.ä{signature}",
        "dots": "..",
    }
    return by_header | whole | {name: issuer.token(**changed) for name, changed in by_claims.items()}


@pytest.mark.parametrize("typ", [{}, {"typ": "JWT"}, {"typ": "application/AT+JWT"}])
def test_a_token_for_access_may_name_its_type(issuer, service, typ):
    assert me(service(), signed({"alg": "RS256", "kid": "one"} | typ, issuer.claims())).status_code == 200


def test_what_is_not_wholly_a_token_of_the_issuer_is_nobodys(issuer, service):
    url = service()
    assert me(url, issuer.token()).status_code == 200
    with httpx.Client(base_url=url, timeout=30) as client:
        for what, token in hostile(issuer).items():
            answer = client.get("/v1/me", headers={"Authorization": f"Bearer {token}".encode()})
            assert answer.status_code == 401, what


def test_clocks_may_be_apart_by_the_leeway(issuer, service):
    url, now = service(leeway_s=60), int(time.time())
    for claims in ({"exp": now - 30}, {"nbf": now + 30}, {"iat": now + 30}):
        assert me(url, issuer.token(**claims)).status_code == 200
    assert me(url, issuer.token(exp=now - 61)).status_code == 401


def test_keys_are_read_once_then_again_for_one_that_is_new_and_not_for_every_one_that_is_made_up(
    issuer, service, monkeypatch
):
    url = service()
    for _ in range(5):
        assert me(url, issuer.token()).status_code == 200
    assert issuer.asked == 1
    for n in range(5):
        assert me(url, issuer.token()).status_code == 200
        unknown = signed({"alg": "RS256", "kid": f"made-up-{n}"}, issuer.claims())
        assert me(url, unknown).status_code == 401
    assert issuer.asked <= 2
    issuer.keys = [rsa_jwk("two")]
    monkeypatch.setattr(auth, "_RETRY_S", 0.0)
    assert me(url, issuer.token("two")).status_code == 200
    assert me(url, issuer.token("one")).status_code == 401  # withdrawn


def test_a_key_that_was_withdrawn_is_believed_until_the_keys_are_read_again_and_no_longer_than_an_hour():
    now = [0.0]
    keys = auth.Keys("http://127.0.0.1:9/nobody", clock=lambda: now[0])
    keys._keys, keys._read_s, keys._tried_s = auth._public_keys([rsa_jwk("one")]), 0.0, 0.0
    assert keys.key("one") is keys.key(None) is not None
    assert [keys.are_due(kid) for kid in ("one", "new")] == [False, False]
    now[0] = 11.0
    assert [keys.are_due(kid) for kid in ("one", "new")] == [False, True]
    now[0] = 301.0
    assert keys.are_due("one")
    keys.read()  # nobody answers there
    assert keys.key("one") is not None
    now[0] = 3601.0
    assert keys.key("one") is None


@pytest.mark.parametrize("fault", ["gone", "moved", "another", "secret", "twice", "short"])
def test_an_issuer_that_answers_wrongly_admits_nobody_and_ends_nothing(issuer, service, fault):
    if fault == "gone":
        issuer.status = 500
    elif fault == "moved":
        issuer.status = 302
    elif fault == "another":
        issuer.named = "https://elsewhere.example"
    elif fault == "secret":
        issuer.keys = [{"kty": "oct", "kid": "one", "k": b64(b"s" * 32)}]
    elif fault == "twice":
        issuer.keys = [rsa_jwk("one"), rsa_jwk("two") | {"kid": "one"}]
    else:
        issuer.keys = [{"kty": "RSA", "kid": "one"}, None]
    url = service()
    assert me(url, issuer.token()).status_code == 401
    assert me(url, ANALYST).status_code == 200


def test_curves_are_verified_where_they_are_allowed(issuer, service):
    issuer.keys = [ec_jwk("curve"), rsa_jwk("one")]
    url = service(algorithms=("ES256",))
    assert me(url, signed({"alg": "ES256", "kid": "curve"}, issuer.claims(), es256)).status_code == 200
    assert me(url, issuer.token()).status_code == 401


@pytest.mark.parametrize(
    "wrong",
    [
        {"issuer": "http://login.example"},
        {"issuer": "file:///etc/passwd"},
        {"issuer": "https://"},
        {"issuer": "https://[::1"},
        {"issuer": "https://login.example\0"},
        {"audience": ""},
        {"algorithms": ("none",)},
        {"algorithms": ("HS256",)},
        {"algorithms": ("RS256", "HS512")},
        {"algorithms": ()},
        {"leeway_s": 3600},
        {"roles": "x"},
    ],
)
def test_a_configuration_that_protects_nothing_is_refused(wrong):
    with pytest.raises(ValidationError):
        OidcConfig(**({"issuer": "https://login.example", "audience": "fairpate"} | wrong))


def test_names_are_different_for_different_callers_and_nobody_elses():
    pairs = [("https://a", "b"), ("https://a", "B"), ("https://a/", "b"), ("https://", "ab"), ("https://a", "b\n")]
    names = [name_of(*pair) for pair in [*pairs, ("https://a", "../é<b>" * 30), ("https://a", "\udce9")]]
    assert len(set(names)) == len(names)
    digest = hashlib.sha256(b'["https://a", "b"]').hexdigest()[:32]
    assert names[0] == f"oidc-b-{digest}"
    for name in [*names, "local"]:
        with pytest.raises(TokenError, match="give another name"):
            check_name(name, "here")
    for name in names:
        assert name in limited(TokenStore(), name, OwnLimit(max_queries=1)).limits
    with pytest.raises(TokenError):
        limited(TokenStore(), "oidc-\n", OwnLimit(max_queries=1))
