"""One noisy sum of integers over sites that share no records, as two state machines without input or output.

Secure aggregation after Bonawitz et al. 2017 (arXiv 1611.04482), with distributed discrete Gaussian noise (Kairouz, Liu
and Steinke 2021, arXiv 2102.06387). Site k sends, modulo 2^64,

    y_k = x_k + noise_k + PRG(b_k) + sum over participants j of +- PRG(s_jk)      x_k: its own numbers
                                                                                  b_k: seed of its own mask
                                                                                  s_jk: agreed with j (X25519)

The pairwise masks cancel in the sum. Both secrets of a site, b_k and the seed of its mask key, are 16 bytes, and every
site of the plan gets a Shamir share of each. For one list of survivors, which is signed by ``threshold`` sites, every
site releases its share of b_k for each survivor k, and of the mask key for each participant that vanished. It never
releases both, and it never signs a second list: two unmaskings with the same noise would expose one site's numbers.

:class:`Site` and :class:`Coordinator` read and write a :class:`Store`. With a durable store, either may be stopped at
any moment and created again: a site then sends its earlier messages again, byte for byte. Neither depends on what the
numbers mean, on timing, or on how bytes travel.

A site's ``place`` is its position in the plan. The ``head`` of its first message is what all sites get of it: its mask
key and the hashes of its seed and shares, signed. Shapes: K sites, D numbers.
"""

import hashlib
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fairpate.privacy.discrete_gaussian import NoiseSource, OsEntropy, discrete_gaussians
from fairpate.types import IntArray, UserError

Step = Literal["hello", "masked", "agreed", "shares"]
STEPS: tuple[Step, ...] = get_args(Step)  # the messages that a site sends, in this order
List = Literal["members", "survivors", "agreement", "sum"]
LISTS: tuple[List, ...] = get_args(List)  # the messages that the coordinator answers with, in this order
# The key in a site's store of the reason why the sum ended; stored when its secrets are erased.
ENDED = "ended"
Words = npt.NDArray[np.uint64]
# The least standard deviation of a site's noise. The sum of such discrete Gaussians is a discrete Gaussian of their
# summed variance up to a factor within 1e-35 of 1 (Kairouz, Liu and Steinke 2021): less than any accountant resolves.
LEAST_STDDEV = 3.0
_MOST_STDDEV = 2.0**52
# The plan keeps every total below this, so that the sum modulo 2^64, read with its sign, is the sum itself.
_LARGEST = 2**62
_FIELD = 2**130 - 5  # a prime above every 16-byte secret
_SECRET, _SHARE, _SIGNATURE, _HASH = 16, 17, 64, 32
_HEAD = 32 + 2 * _HASH + _SIGNATURE  # of a hello: key for masks, hashes of the own mask's seed and of the shares
_SEALED = 12 + 2 * _SHARE + 16  # nonce, two shares, tag


class SumError(UserError):
    """A noisy sum over sites failed: a message does not match the plan (the agreed terms) or an earlier message, or the
    sum cannot be unmasked."""


class LateError(SumError):
    """A site's message came after its step of the protocol had ended, or differs from the message that the site sent
    earlier for this step; the sum continues without it."""


class Store(Protocol):
    """A key-value store of one party in one sum, in which a stored value is never replaced: a ``dict``, or a durable
    file."""

    def get(self, key: str, /) -> bytes | None:
        """Return the value stored under ``key``, None for an unknown key."""

    def setdefault(self, key: str, value: bytes, /) -> bytes:
        """Store ``value`` unless ``key`` has a value, and return the value that it has."""


@dataclass(frozen=True, kw_only=True)
class PublicKeys:
    """The long-term public keys of a site: Ed25519 (``signing``) for its signatures, X25519 (``sealing``) for secret
    shares that are encrypted for the site."""

    signing: bytes
    sealing: bytes

    def __post_init__(self) -> None:
        try:
            Ed25519PublicKey.from_public_bytes(self.signing)
            # Any bytes of the right length make an X25519 key; only an exchange refuses points of small order.
            _PROBE.exchange(X25519PublicKey.from_public_bytes(self.sealing))
        except ValueError as error:
            raise SumError(
                f"Public keys of a site: expected an Ed25519 and an X25519 key of 32 bytes each ({error}); ask the "
                "site for its keys again."
            ) from error

    def signed(self, signature: bytes, text: bytes) -> bool:
        """Return whether ``signature`` is a valid signature of ``text`` by the site with these keys."""
        try:
            Ed25519PublicKey.from_public_bytes(self.signing).verify(signature, text)
        except InvalidSignature:
            return False
        return True


class SiteKey:
    """The private keys of a site, derived from one secret of 32 bytes."""

    def __init__(self, secret: bytes) -> None:
        # One secret in the file, two independent keys: a key that signs must not also agree on secrets.
        signing = Ed25519PrivateKey.from_private_bytes(_derived(secret, b"signing"))
        self.sealing = X25519PrivateKey.from_private_bytes(_derived(secret, b"sealing"))
        self.public = PublicKeys(
            signing=signing.public_key().public_bytes_raw(), sealing=self.sealing.public_key().public_bytes_raw()
        )
        # Returns this site's signature of a text; equal texts have equal signatures.
        self.sign = signing.sign


@dataclass(frozen=True, kw_only=True)
class Draw:
    """The terms of one noisy sum over sites, which all parties know before it begins.

    ``plan``: digest of the plan; ``number``: position of this sum in the plan; ``may_vanish`` and ``may_collude``: how
    many sites may vanish, and how many may collude with the coordinator; ``size``: the length D of the sum;
    ``noise_stddev``: standard deviation, per number, of the noise for which the sum's cost is computed. SumError if
    there are too few sites for ``may_vanish`` and ``may_collude``, or if the noise that each site has to add is out of
    range.
    """

    plan: bytes
    number: int
    sites: tuple[PublicKeys, ...]
    may_vanish: int
    may_collude: int
    size: int
    noise_stddev: float

    def __post_init__(self) -> None:
        # One party in two places would count as two honest sites, each with noise that nobody knows.
        if len({keys.signing for keys in self.sites}) < len(self.sites):
            raise SumError(
                "Sites' keys: expected a different key for every site, got one twice; let every site make its own key."
            )
        if not (self.may_vanish >= 0 and self.may_collude >= 1):
            raise SumError(
                f"Expected may_vanish >= 0 and may_collude >= 1, got {self.may_vanish} and {self.may_collude}; count "
                "at least one colluding site, since a site that sees the sum knows its own noise."
            )
        # Then the sites that stay reach the threshold: K - d >= (K + c) // 2 + 1.
        if not 2 * self.may_vanish + self.may_collude < len(self.sites):
            raise SumError(
                f"Expected 2 * may_vanish + may_collude < sites, got {self.may_vanish}, {self.may_collude} and "
                f"{len(self.sites)} sites; let fewer vanish or collude, or add sites."
            )
        if not LEAST_STDDEV <= self.share_stddev < _MOST_STDDEV:
            raise SumError(
                f"Expected noise of {LEAST_STDDEV:g} to {_MOST_STDDEV:g} at each site, got {self.share_stddev:.3g}, as "
                f"{self.num_honest} sites share {self.noise_stddev:.4g}; ask for more privacy, or plan fewer sites."
            )

    @property
    def least(self) -> int:
        """The smallest number of survivors (sites that sent their masked numbers) with which the sum is unmasked: with
        fewer, it would have less noise than its cost assumes."""
        return len(self.sites) - self.may_vanish

    @property
    def num_honest(self) -> int:
        """The number of sites whose noise an attacker does not know if as many sites vanish and collude as the plan
        allows."""
        return self.least - self.may_collude

    @cached_property
    def share_stddev(self) -> float:
        """The standard deviation of each site's noise: large enough that the noise of ``num_honest`` sites has at least
        the variance ``noise_stddev`` squared."""
        priced, share = Fraction(self.noise_stddev) ** 2, self.noise_stddev / math.sqrt(self.num_honest)
        # The root is rounded: a float lower, the noise would be less than what is priced.
        while self.num_honest * Fraction(share) ** 2 < priced:
            share = math.nextafter(share, math.inf)
        return share

    @property
    def threshold(self) -> int:
        """The number of Shamir shares that reconstruct a secret, and of survivors' signatures that make a list of
        survivors valid."""
        # More than half of the honest sites and all that collude: two lists with as many share an honest site.
        return (len(self.sites) + self.may_collude) // 2 + 1

    def tag(self, purpose: str, *places: int) -> bytes:
        """Return a hash of plan, sum, ``purpose`` and the sites in ``places``. It is part of each signature and
        of each key derived for a sum, so that none of them is valid for another use."""
        # ``repr`` separates the parts: no two purposes give the same bytes.
        parts = ("fairpate.sites/1", self.plan.hex(), self.number, purpose, places)
        return hashlib.sha256(repr(parts).encode()).digest()

    def verify(self, place: int, signature: bytes, text: bytes, purpose: Step | Literal["done"]) -> None:
        """Raise SumError unless ``signature`` is site ``place``'s signature of ``text`` for the step ``purpose``. In
        the step `hello`, ``text`` begins with the site's public mask key, which must be usable too."""
        if not self.sites[place].signed(signature, self.tag(purpose, place) + text):
            raise SumError(
                f"Site {place}: its message '{purpose}' has no valid signature for this plan, sum and list of "
                "participants; let the site use its own key and the present plan."
            )
        if purpose == "hello":
            _exchanged(_PROBE, text[:32], place)

    def flags(self, places: Sequence[int] | Mapping[int, object]) -> bytes:
        """Return a list of sites as bytes: one for each site of the plan, 1 if the site is in ``places`` and else 0."""
        return bytes(place in places for place in range(len(self.sites)))

    def parts(self, message: bytes, size: int, *, least: int = 0) -> dict[int, bytes]:
        """Split a message of the coordinator, and return a mapping from site to bytes. The message is a list of sites,
        as :meth:`flags` encodes it, followed by ``size`` bytes for each listed site.

        SumError for a damaged list, and for a list of fewer than ``least`` sites.
        """
        flags, rest = message[: len(self.sites)], message[len(self.sites) :]
        places = [place for place, flag in enumerate(flags) if flag == 1]
        if len(flags) != len(self.sites) or set(flags) - {0, 1} or len(rest) != size * len(places):
            raise SumError(
                f"The coordinator's list of sites is damaged: expected one for {len(self.sites)} sites, got "
                f"{len(message)} bytes; give the same command again."
            )
        if len(places) < least:
            raise SumError(
                f"The coordinator's list of sites is too short: expected at least {least} sites, got {len(places)}; "
                "make a new plan."
            )
        return {place: rest[size * row : size * (row + 1)] for row, place in enumerate(places)}

    def longest(self, name: List) -> int:
        """Return the largest length in bytes that the coordinator's message ``name`` can have: a list of sites, with
        all of them in it, or the sum."""
        if name == "sum":
            return 8 * self.size
        each = {"members": _HEAD + _SEALED, "survivors": _HASH + _SIGNATURE, "agreement": _SIGNATURE}[name]
        return len(self.sites) * (1 + each)

    def digest(self, heads: Mapping[int, bytes], survivors: bytes | None = None) -> bytes:
        """Return the digest that sites sign: of the list of participants or, with ``survivors``, of this list and the
        list of survivors (sites that sent masked numbers).

        ``heads`` are the signed beginnings of the participants' first messages. Each participant signs the first digest
        together with its masked numbers. Each survivor signs the digest of both lists, once.
        """
        members = hashlib.sha256(self.tag("members") + self.flags(heads) + b"".join(heads.values())).digest()
        return members if survivors is None else hashlib.sha256(self.tag("survivors") + members + survivors).digest()

    def mask(self, secret: bytes, *places: int) -> Words:
        """Expand ``secret`` to a mask of D pseudorandom words, for the one site or the pair of sites in ``places``."""
        # A nonce of zeros is safe: the key is derived for this plan, sum and pair, and masks only one message.
        stream = Cipher(ChaCha20(_derived(secret, self.tag("mask", *places)), bytes(16)), mode=None).encryptor()
        return np.frombuffer(stream.update(bytes(8 * self.size)), dtype="<u8").astype(np.uint64, copy=False)

    def pair_mask(self, own: X25519PrivateKey, place: int, other_key: bytes, other: int) -> Words:
        """Return the mask that site ``place`` adds to its numbers because of site ``other``. The other site adds the
        same mask with the other sign, so that both cancel in the sum over all sites.

        ``own`` is the private mask key of site ``place``, ``other_key`` the public one of the other site.
        """
        mask = self.mask(_exchanged(own, other_key, other), min(place, other), max(place, other))
        # The other site adds the same words with the other sign.
        return mask if place < other else 0 - mask


class Site:
    """The state machine of one site in one sum: its methods return the site's messages, in the order of the protocol.

    ``store`` belongs to this sum of this plan, and is erased once the sum is known.
    """

    def __init__(self, draw: Draw, place: int, key: SiteKey, store: Store) -> None:
        assert draw.sites[place] == key.public  # as `SitePlan.place_of` found it
        # Its secrets were erased: new ones would be a second draw of noise for the same sum.
        if store.get(ENDED) is not None:
            raise SumError(f"This sum has ended at this site ({store.get(ENDED)!r}); a new attempt needs a new plan.")
        self._draw, self._place, self._key, self._store = draw, place, key, store

    def hello(self) -> bytes:
        """Return the site's first message: its public mask key, and encrypted Shamir shares of its two secrets (the
        seeds of its mask key and of its own mask) for every site."""
        draw, stored = self._draw, self._store.get("hello")
        if stored is None:
            own, seed = secrets.token_bytes(_SECRET), secrets.token_bytes(_SECRET)
            shares = [_shares(secret, threshold=draw.threshold, count=len(draw.sites)) for secret in (own, seed)]
            sealed = b""
            for place, pair in enumerate(zip(*shares, strict=True)):
                nonce = secrets.token_bytes(12)
                sealed += nonce + self._box(place, sender=self._place).encrypt(nonce, b"".join(pair), None)
            head = (
                _mask_key(draw, own).public_key().public_bytes_raw()
                + hashlib.sha256(draw.tag("own mask", self._place) + seed).digest()
            )
            head += hashlib.sha256(sealed).digest()
            head += self._signed("hello", head)
            # Secrets and message in one value: no stop in between leaves one without the other.
            stored = self._store.setdefault("hello", own + seed + head + sealed)
        return stored[2 * _SECRET :]

    def masked(self, members: bytes, exact_D: IntArray, source: NoiseSource | None = None) -> bytes:
        """Return the site's second message: its numbers ``exact_D`` with noise and masks added. ``members`` is the list
        of participants.

        ``source`` None: noise from the operating system's entropy. Noise is drawn once: later calls return the same
        message. SumError if ``members`` is not valid, or differs from that of an earlier call.
        """
        draw, place = self._draw, self._place
        heads, _ = self._members(members)
        for each, head in heads.items():
            # A mask key that its site has not signed could be the coordinator's own.
            draw.verify(each, head[-_SIGNATURE:], head[:-_SIGNATURE], "hello")
        # Kept before the noise is drawn: with another list, the same noise would have other masks.
        self._once("members", members)
        stored = self._store.get("masked")
        if stored is None:
            # Negative numbers wrap modulo 2^64, as the sum does.
            total = _with_noise(draw, exact_D, source or OsEntropy()).astype(np.uint64)
            stored = self._stored("hello")
            own, seed = stored[:_SECRET], stored[_SECRET : 2 * _SECRET]
            total += draw.mask(seed, place)
            for other, head in heads.items():
                if other != place:
                    total += draw.pair_mask(_mask_key(draw, own), place, head[:32], other)
            body = total.astype("<u8").tobytes()
            body += self._signed("masked", draw.digest(heads) + hashlib.sha256(body).digest())
            stored = self._store.setdefault("masked", body)
        return stored

    def agreed(self, survivors: bytes) -> bytes:
        """Sign ``survivors``, the list of sites that sent masked numbers, and return the signature.

        SumError if the site has signed a different list before. SumError also for a list whose sum must not be
        unmasked: one with too few sites, without this site, or with sites that had another list of participants.
        """
        draw = self._draw
        heads, _ = self._members(self._stored("members"))
        digest = draw.digest(heads)
        # With fewer survivors, there is less noise than was priced.
        found = draw.parts(survivors, _HASH + _SIGNATURE, least=draw.least)
        if not found.keys() <= heads.keys() or self._place not in found:
            raise SumError(
                "The coordinator's list of survivors has sites that did not take part, or lacks this site; make a "
                "new plan."
            )
        # Each survivor signed the same participants: with other lists, pairwise masks would not cancel.
        for place, part in found.items():
            draw.verify(place, part[_HASH:], digest + part[:_HASH], "masked")
        # On the disk before the signature exists: after a crash, no other list is signed.
        self._once("survivors", survivors)
        return self._signed("agreed", draw.digest(heads, survivors))

    def shares(self, agreement: bytes) -> bytes:
        """Return the site's last message, which has one Shamir share of a secret of each participant. For a participant
        that survived (sent masked numbers), the secret is the seed of its own mask; for one that vanished, it is the
        seed of its mask key.

        SumError unless ``agreement`` has the signatures of ``threshold`` survivors for the list of survivors that this
        site signed.
        """
        draw, survivors = self._draw, self._stored("survivors")
        heads, sealed = self._members(self._stored("members"))
        digest = draw.digest(heads, survivors)
        signed, survived = draw.parts(agreement, _SIGNATURE), draw.parts(survivors, _HASH + _SIGNATURE)
        if len(signed) < draw.threshold or not signed.keys() <= survived.keys():
            raise SumError(
                f"Expected {draw.threshold} sites to sign the list of sites that are left, got {len(signed)}; make a "
                "new plan."
            )
        # A list that fewer signed may have a rival: the shares for both would unmask a site's own numbers.
        for place, signature in signed.items():
            draw.verify(place, signature, digest, "agreed")
        body = b""
        for place, box in sealed.items():
            try:
                pair = self._box(place, sender=place).decrypt(box[:12], box[12:], None)
            except InvalidTag:
                raise SumError(
                    f"Site {place}: its shares for this site cannot be decrypted; make a new plan without it."
                ) from None
            body += pair[_SHARE:] if place in survived else pair[:_SHARE]
        return body + self._signed("shares", digest + body)

    def _members(self, members: bytes) -> tuple[dict[int, bytes], dict[int, bytes]]:
        """Split ``members``, the coordinator's message with the list of participants. Return the signed beginning of
        each participant's first message, and the Shamir shares that each participant encrypted for this site."""
        draw = self._draw
        parts = draw.parts(members, _HEAD + _SEALED, least=draw.least)
        heads = {place: part[:_HEAD] for place, part in parts.items()}
        if heads.get(self._place) != self.hello()[:_HEAD]:
            raise SumError("The coordinator's list of participants lacks this site's own message; make a new plan.")
        return heads, {place: part[_HEAD:] for place, part in parts.items()}

    def _once(self, key: str, value: bytes) -> None:
        if self._store.setdefault(key, value) != value:
            raise SumError(
                f"The coordinator sent two different lists of {key}; do not trust it: make a new plan with another one."
            )

    def _stored(self, key: str) -> bytes:
        value = self._store.get(key)
        if value is None:
            raise SumError(
                f"This site has no list of {key} yet, or erased it, and does not help to unmask the sum; make a "
                "new plan."
            )
        return value

    def _signed(self, purpose: Step, text: bytes) -> bytes:
        return self._key.sign(self._draw.tag(purpose, self._place) + text)

    def _box(self, other: int, *, sender: int) -> ChaCha20Poly1305:
        # Only these two sites can derive the key: it shows who sealed the shares.
        secret = _exchanged(self._key.sealing, self._draw.sites[other].sealing, other)
        reader = other if sender == self._place else self._place
        return ChaCha20Poly1305(_derived(secret, self._draw.tag("seal", sender, reader)))


class Coordinator:
    """The state machine of the coordinator in one sum: it receives the sites' messages, closes the lists of sites that
    sent them, and unmasks the sum."""

    def __init__(self, draw: Draw, store: Store) -> None:
        self._draw, self._store = draw, store
        # After a stop, all messages that were answered are in the store.
        places = range(len(draw.sites))
        self._messages: dict[Step, dict[int, bytes]] = {
            step: {place: found for place in places if (found := store.get(f"{step}/{place}")) is not None}
            for step in STEPS
        }

    def receive(self, step: Step, place: int, message: bytes) -> None:
        """Store the message of site ``place`` for the protocol's ``step``; storing the same message again has no
        effect.

        SumError for a message that no honest site sends; LateError for a message that differs from an earlier one, or
        that comes after the list for this step was closed.
        """
        known = self._messages[step]
        if known.get(place) != message:
            self._check(step, place, message)
            closing: dict[Step, str] = {"hello": "members", "masked": "survivors"}
            if place in known or (step in closing and self._store.get(closing[step]) is not None):
                raise LateError(
                    f"Site {place}: its message '{step}' is not used, as it is late or differs from an earlier one; "
                    "let the site wait for the sum."
                )
            known[place] = self._store.setdefault(f"{step}/{place}", message)

    def advance(self, *, time_is_up: bool = False) -> int:
        """Close every list of sites for which all sites have answered; if ``time_is_up``, close the first open list
        without the missing sites.

        Returns the number of closed lists, the sum included. SumError if time is up and fewer sites answered than the
        plan needs.
        """
        draw, store = self._draw, self._store
        hellos, masked, agreed, shares = (self._messages[step] for step in STEPS)
        if store.get("members") is None:
            if not self._is_complete(hellos, len(draw.sites), draw.least, "hello", time_is_up):
                return 0
            store.setdefault("members", draw.flags(hellos))
            time_is_up = False  # each list has its own time
        if store.get("survivors") is None:
            if not self._is_complete(masked, len(self._heads), draw.least, "masked", time_is_up):
                return 1
            # In order of places, as in the flags; the messages came in any order.
            found = {place: masked[place] for place in sorted(masked)}
            parts = (hashlib.sha256(y[:-_SIGNATURE]).digest() + y[-_SIGNATURE:] for y in found.values())
            store.setdefault("survivors", draw.flags(found) + b"".join(parts))
            time_is_up = False
        if store.get("agreement") is None:
            if not self._is_complete(agreed, draw.threshold, draw.threshold, "agreed", time_is_up):
                return 2
            store.setdefault("agreement", draw.flags(agreed) + b"".join(agreed[place] for place in sorted(agreed)))
            time_is_up = False
        if store.get("sum") is None and self._is_complete(shares, draw.threshold, draw.threshold, "shares", time_is_up):
            total_D = self._unmasked()
            if total_D is not None:
                store.setdefault("sum", total_D.astype("<i8").tobytes())
            elif time_is_up or len(shares) == len(self._survivors):
                raise SumError(
                    "Too many sites sent wrong shares, so secrets do not match their hashes; the sum ends, and a new "
                    "attempt needs a new plan."
                )
        return 3 if store.get("sum") is None else 4

    def listed(self, name: str, place: int = 0) -> bytes | None:
        """Return the closed list of sites ``name``, or the sum, as bytes for site ``place``; None while the list is
        open.

        The list of participants, ``members``, contains the shares that were encrypted for this site; ``survivors``,
        ``agreement`` and ``sum`` are the same for all sites.
        """
        flags, hellos = self._store.get(name), self._messages["hello"]
        if flags is None or name != "members":
            return flags
        cut = slice(_HEAD + _SEALED * place, _HEAD + _SEALED * (place + 1))
        return flags + b"".join(hellos[each][:_HEAD] + hellos[each][cut] for each in self._heads)

    @property
    def total_D(self) -> IntArray | None:
        """The noisy sum (D,) of the sites' numbers; None until it is unmasked."""
        return None if (stored := self._store.get("sum")) is None else sum_of(stored)

    def _is_complete(self, messages: Mapping[int, bytes], most: int, least: int, step: Step, time_is_up: bool) -> bool:
        if time_is_up and len(messages) < least:
            raise SumError(
                f"Time is up: {len(messages)} sites sent '{step}', the plan needs {least}; the sum ends, and a new "
                "attempt needs a new plan."
            )
        return len(messages) >= (least if time_is_up else most)

    def _check(self, step: Step, place: int, message: bytes) -> None:
        draw, is_survivor = self._draw, step in ("agreed", "shares")
        if not 0 <= place < len(draw.sites):
            raise SumError(
                f"Site {place}: the plan has {len(draw.sites)} sites, numbered from 0; give the number of one of them."
            )
        if step != "hello" and place not in (self._survivors if is_survivor else self._heads):
            raise LateError(
                f"Site {place}: its message '{step}' is not used, as an earlier one did not come in time; let the site "
                "wait for the sum."
            )
        lengths: dict[Step, int] = {
            "hello": _HEAD + _SEALED * len(draw.sites),
            "masked": 8 * draw.size + _SIGNATURE,
            "agreed": _SIGNATURE,
            "shares": _SHARE * len(self._heads) + _SIGNATURE,
        }
        if len(message) != lengths[step]:
            raise SumError(
                f"Site {place}: expected {lengths[step]} bytes in '{step}', got {len(message)}; use the same version "
                "of fairpate as the coordinator."
            )
        body, signature = message[:-_SIGNATURE], message[-_SIGNATURE:]
        if step == "hello":
            # The head alone is signed, as only the head goes to all sites; it has the hash of the shares.
            head = message[:_HEAD]
            draw.verify(place, head[-_SIGNATURE:], head[:-_SIGNATURE], step)
            if hashlib.sha256(message[_HEAD:]).digest() != message[32 + _HASH : 32 + 2 * _HASH]:
                raise SumError(
                    f"Site {place}: the shares in its message '{step}' do not match its signature; let it join again."
                )
        elif step == "masked":
            draw.verify(place, signature, draw.digest(self._heads) + hashlib.sha256(body).digest(), step)
        else:
            draw.verify(place, signature, draw.digest(self._heads, self._store.get("survivors")) + body, step)

    @property
    def _heads(self) -> dict[int, bytes]:
        """The signed beginning (head) of each participant's first message, by the site's position in the plan; empty
        while the list of participants is open."""
        flags = self._store.get("members") or b""
        return {place: self._messages["hello"][place][:_HEAD] for place, flag in enumerate(flags) if flag}

    @property
    def _survivors(self) -> dict[int, bytes]:
        survivors = self._store.get("survivors")
        return {} if survivors is None else self._draw.parts(survivors, _HASH + _SIGNATURE)

    def _unmasked(self) -> IntArray | None:
        """Return the noisy sum (D,) without masks; None if wrong shares prevent the reconstruction of a site's
        secret."""
        draw, heads, survivors = self._draw, self._heads, self._survivors
        shares = {place: body[:-_SIGNATURE] for place, body in self._messages["shares"].items()}
        # All arithmetic wraps modulo 2^64, as the masks do.
        total = np.zeros(draw.size, dtype=np.uint64)
        for place in survivors:
            total += np.frombuffer(self._messages["masked"][place][:-_SIGNATURE], dtype="<u8")
        for row, (place, head) in enumerate(heads.items()):
            held = {holder: body[_SHARE * row : _SHARE * (row + 1)] for holder, body in shares.items()}
            # Wrong shares give a wrong secret silently: each secret is compared with its hash or public key.
            for secret in _secrets(held, threshold=draw.threshold):
                own_mask = hashlib.sha256(draw.tag("own mask", place) + secret).digest()
                if place in survivors and own_mask == head[32 : 32 + _HASH]:
                    total -= draw.mask(secret, place)
                    break
                if place not in survivors:
                    key = _mask_key(draw, secret)
                    if key.public_key().public_bytes_raw() == head[:32]:
                        for other in survivors:
                            # What the survivors added for it, which nothing cancels.
                            total += draw.pair_mask(key, place, heads[other][:32], other)
                        break
            else:
                return None
        # Two's complement: totals are below 2^62 in absolute value.
        return total.view(np.int64)


def sum_of(message: bytes) -> IntArray:
    """Decode the message with the noisy sum that the coordinator sends to all sites: return the numbers (D,)."""
    return np.frombuffer(message, dtype="<i8").astype(np.int64)


def known_to_colluders(draw: Draw, place: int, stores: Mapping[int, Mapping[str, bytes]]) -> IntArray:
    """Return what the coordinator learns of site ``place`` if all other sites collude with it: the site's numbers (D,)
    with its own noise alone. ``stores`` are those of all participants, which an audit has in one process."""
    sent, hello = stores[place]["masked"], stores[place]["hello"]
    # The seed of a survivor's own mask is reconstructed from shares in any case.
    total = np.frombuffer(sent[:-_SIGNATURE], dtype="<u8") - draw.mask(hello[_SECRET : 2 * _SECRET], place)
    public = hello[2 * _SECRET :][:32]
    for other, store in stores.items():
        if other != place:
            # What the other one adds cancels what this site added.
            total += draw.pair_mask(_mask_key(draw, store["hello"][:_SECRET]), other, public, place)
    return total.view(np.int64)


def _with_noise(draw: Draw, exact_D: IntArray, source: NoiseSource) -> IntArray:
    if exact_D.shape != (draw.size,) or exact_D.dtype != np.int64:
        raise SumError(
            f"Expected {draw.size} whole numbers of 64 bits, got {exact_D.dtype} of shape {exact_D.shape}; report "
            "this as a defect."
        )
    most = _LARGEST // len(draw.sites)
    noise_D = discrete_gaussians(draw.share_stddev, source.machine_words([f"sum {draw.number}"], draw.size)[0], source)
    # Tested before they are added: an addition that wraps would look small.
    if max(np.abs(each).max(initial=0) for each in (exact_D, noise_D)) > most // 2:
        raise SumError(
            f"Expected numbers of at most {most // 2} for {len(draw.sites)} sites, or the sum overflows; plan "
            "fewer sites."
        )
    return exact_D + noise_D


def _exchanged(own: X25519PrivateKey, other: bytes, place: int) -> bytes:
    try:
        return own.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError:
        # A point of small order, with which anybody could agree on the same secret.
        raise SumError(
            f"Site {place}: its key for masks is not a usable X25519 key; make a new plan without it."
        ) from None


# Only tests whether the other side's key can be used; no secret depends on this one.
_PROBE = X25519PrivateKey.from_private_bytes(bytes(range(32)))


def _derived(secret: bytes, purpose: bytes) -> bytes:
    return HKDF(algorithm=SHA256(), length=32, salt=None, info=purpose).derive(secret)


def _mask_key(draw: Draw, seed: bytes) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(_derived(seed, draw.tag("mask key")))


def _shares(secret: bytes, *, threshold: int, count: int) -> Iterator[bytes]:
    """Yield ``count`` Shamir shares of ``secret``: any ``threshold`` of them reconstruct it, fewer reveal nothing."""
    # Whole numbers modulo a prime: 110 times as fast at 500 sites as pycryptodome's field of 2^128, in Python too.
    factors = [secrets.randbelow(_FIELD) for _ in range(threshold - 1)]
    # At 0 the polynomial is the secret itself, so sites have the points from 1 on.
    for x in range(1, count + 1):
        value = 0
        for factor in factors:
            value = (value + factor) * x % _FIELD
        yield ((value + int.from_bytes(secret, "little")) % _FIELD).to_bytes(_SHARE, "little")


def _secrets(shares: Mapping[int, bytes], *, threshold: int) -> Iterator[bytes]:
    """Yield candidates for one secret, each reconstructed from another choice of ``threshold`` Shamir shares.

    ``shares`` maps the holders' positions in the plan to their shares. If all shares are right, the first candidate is
    right; otherwise a later one may be.
    """
    holders = sorted(shares)
    # Shifted by one holder at a time, so that one wrong share, or several side by side, are left out.
    for first in range(len(holders) if len(holders) > threshold else 1):
        chosen = tuple((holders[first:] + holders[:first])[:threshold])
        values = [int.from_bytes(shares[holder], "little") for holder in chosen]
        total = sum(map(int.__mul__, _weights(chosen), values)) % _FIELD
        # A wrong share gives any number below the prime, which may need more than 16 bytes.
        yield (total % 2 ** (8 * _SECRET)).to_bytes(_SECRET, "little")


@lru_cache(maxsize=16)
def _weights(holders: tuple[int, ...]) -> list[int]:
    """Return the Lagrange weights with which a polynomial's values at the points holder + 1 give its value at 0."""
    weights = []
    for holder in holders:
        above = below = 1
        for other in holders:
            if other != holder:
                # Modulo the prime, a division is a product with the inverse.
                above, below = above * (other + 1) % _FIELD, below * (other - holder) % _FIELD
        weights.append(above * pow(below, -1, _FIELD) % _FIELD)
    return weights
