"""Data keys: one a segment, in its manifest, wrapped with an RSA key pair of the operator's (RsaEncryptionProvider, AesEncryptionProvider).

Wrapped by OAEP with SHA3-512 for the label's hash and for MGF1 (``cryptography`` refuses that hash, pycryptodome does it); chunks by
AES-256-GCM (``cryptography``). Both come with the extra ``aiven`` and are imported when something is encrypted.

A plug-in draws data key, associated data and initialization vectors at random. Here they are derived, so that a segment that is uploaded
again after a crash becomes the same bytes and meets what is there already as its own (I7): a random key would have died with
the process, and the object that it left would never be readable, nor deletable while another process may be about to finish it.
From the active pair's private key, the segment's id and a digest of *every byte that is encrypted*, cut into chunks as they are:

    HKDF-SHA512(private exponent, info = purpose || segment id || digest) -> data key (32) || associated data (32) || OAEP seed (64)

So no two contents share a data key, and under one data key a vector (4 bytes for the object, 8 for the chunk's number: SP 800-38D, 8.2.1)
never meets two plaintexts. Nobody without the private key can tell these keys from random ones; with it, he could unwrap them anyway.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from compactor.errors import Refused, UsageError
from compactor.extras import need
from compactor.tier.layouts.aiven.chunk_index import Misfit
from compactor.tier.layouts.aiven.manifest import SegmentKey
from compactor.tier.layouts.aiven.transform import IV_BYTES, OVERHEAD

if TYPE_CHECKING:
    from Crypto.PublicKey.RSA import RsaKey

KEY_BYTES: Final = 32
AAD_BYTES: Final = 32
_SEED_BYTES: Final = 64
_PURPOSE: Final = b"tiered-compactor segment key 1"


class SegmentCipher:
    """ChunkCipher."""

    def __init__(self, data_key: bytes, aad: bytes) -> None:
        need("aiven", "an encrypted segment")
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._aes = AESGCM(data_key)
        self._aad = aad

    def encrypted(self, iv: bytes, plain: bytes) -> bytes:
        return iv + self._aes.encrypt(iv, plain, self._aad)

    def decrypted(self, stored: bytes) -> bytes:
        from cryptography.exceptions import InvalidTag

        if len(stored) < OVERHEAD:
            raise Misfit("an encrypted chunk is cut off")
        try:
            return self._aes.decrypt(stored[:IV_BYTES], stored[IV_BYTES:], self._aad)
        except InvalidTag:
            raise Misfit("a chunk is not what was encrypted under the manifest's data key") from None


@dataclass(frozen=True)
class Sealed:
    """What encrypts one segment, and what its manifest says of it."""

    cipher: SegmentCipher
    key: SegmentKey


class KeyRing:
    """Private keys by the id of their pair; read when they are first needed. Usable by several threads.

    :param files: id -> PEM file of the private key (PKCS#8), which holds the public one as well.
    """

    def __init__(self, files: Mapping[str, str]) -> None:
        self._files = files
        self._keys: dict[str, RsaKey] = {}
        self._lock = threading.Lock()

    def cipher(self, key: SegmentKey) -> SegmentCipher:
        """Raises Refused where the pair is missing or is another one; UsageError for a file that is no private key."""
        pair, _, wrapped = key.data_key.partition(":")
        if pair not in self._files:
            known = ", ".join(sorted(self._files)) or "none"
            raise Refused(
                f"it is encrypted for key pair {pair!r}, whose private key is not configured (there: {known})",
                hint=f'Add {pair} = "/path/to/its/private.pem" to key_pairs under [tier.aiven]',
            )
        private = self._private(pair)
        from Crypto.Cipher import PKCS1_OAEP
        from Crypto.Hash import SHA3_512

        try:
            data_key = PKCS1_OAEP.new(private, SHA3_512).decrypt(base64.b64decode(wrapped))
        except ValueError as error:
            raise _another(pair, self._files[pair]) from error
        if len(data_key) != KEY_BYTES:
            raise _another(pair, self._files[pair])
        return SegmentCipher(data_key, base64.b64decode(key.aad))

    def sealed(self, pair: str, segment_id: str, digest: bytes) -> Sealed:
        """The keys of one segment with one content; ``digest``: of all that will be encrypted, cut as it will be. Raises UsageError."""
        private = self._private(pair)
        from Crypto.Cipher import PKCS1_OAEP
        from Crypto.Hash import SHA3_512
        from cryptography.hazmat.primitives.hashes import SHA512
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        secret = private.d.to_bytes((int(private.n).bit_length() + 7) // 8, "big")
        info = b"\0".join((_PURPOSE, pair.encode(), segment_id.encode(), digest))
        derived = HKDF(SHA512(), KEY_BYTES + AAD_BYTES + _SEED_BYTES, salt=None, info=info).derive(secret)
        data_key, aad, seed = derived[:KEY_BYTES], derived[KEY_BYTES : KEY_BYTES + AAD_BYTES], derived[-_SEED_BYTES:]
        wrapped = PKCS1_OAEP.new(private.public_key(), SHA3_512, randfunc=lambda size: seed[:size]).encrypt(data_key)
        return Sealed(
            SegmentCipher(data_key, aad), SegmentKey(f"{pair}:{base64.b64encode(wrapped).decode()}", base64.b64encode(aad).decode())
        )

    def placeholder(self, pair: str) -> SegmentKey:
        """As long as what a manifest will say."""
        wrapped = bytes((int(self._private(pair).n).bit_length() + 7) // 8)
        return SegmentKey(f"{pair}:{base64.b64encode(wrapped).decode()}", base64.b64encode(bytes(AAD_BYTES)).decode())

    def _private(self, pair: str) -> RsaKey:
        with self._lock:
            if pair not in self._keys:
                self._keys[pair] = _loaded(pair, self._files[pair])
            return self._keys[pair]


def iv(stream: int, number: int) -> bytes:
    """Of chunk ``number`` of the log (stream 0) or of the index files (stream 1)."""
    return stream.to_bytes(4, "big") + number.to_bytes(8, "big")


def _loaded(pair: str, file: str) -> RsaKey:
    need("aiven", "an encrypted segment")
    from Crypto.PublicKey import RSA

    hint = "key_pairs under [tier.aiven] names, for each id, a PEM file with an RSA private key (PKCS#8)"
    try:
        key = RSA.import_key(Path(file).read_bytes())
    except OSError as error:
        raise UsageError(f"the private key of key pair {pair!r} cannot be read from {file}: {error.strerror}", hint=hint) from error
    except (ValueError, IndexError, TypeError) as error:
        raise UsageError(f"{file}, for key pair {pair!r}, is no private key: {error}", hint=hint) from error
    if not key.has_private():
        raise UsageError(f"{file}, for key pair {pair!r}, is a public key; the private one is needed", hint=hint)
    return key


def _another(pair: str, file: str) -> Refused:
    return Refused(
        f"its data key cannot be unwrapped with {file}, which is configured for key pair {pair!r}: another key, or the manifest is damaged",
        hint="Compare key_pairs under [tier.aiven] with the brokers' rsm.config.encryption.key.pairs",
    )
