"""Data keys of encrypted segments: one per segment, stored in its manifest, wrapped with the operator's RSA key pair.

Compatible with RsaEncryptionProvider and AesEncryptionProvider: wrapped with OAEP, SHA3-512 for label hash and MGF1 (pycryptodome, because
``cryptography`` refuses that hash); chunks with AES-256-GCM (``cryptography``). Both packages come with the extra ``aiven``.

The plug-in chooses data key, associated data and initialization vectors at random. Here they are derived, so that a segment which is
uploaded again after a crash has the same bytes and matches what is already stored (determinism, I7). They are derived from the active
pair's private key, the segment id and a digest of *every byte that is encrypted*, in its chunks:

    HKDF-SHA512(private exponent, info = purpose || segment id || digest) -> data key (32) || associated data (32) || OAEP seed (64)

Different contents therefore never share a data key, and under one data key no initialization vector (4 bytes for the object, 8 for the
chunk number: SP 800-38D, 8.2.1) is used for two plaintexts. Without the private key the derived keys cannot be told from random ones.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from compactor.errors import Refused, UsageError
from compactor.extras import require_pip_extra
from compactor.tier.layouts.aiven.chunk_index import InvalidAivenDataError
from compactor.tier.layouts.aiven.manifest import WrappedSegmentKey
from compactor.tier.layouts.aiven.transform import ENCRYPTION_OVERHEAD, IV_BYTES

if TYPE_CHECKING:
    from Crypto.PublicKey.RSA import RsaKey

DATA_KEY_BYTES: Final = 32
AAD_BYTES: Final = 32
_SEED_BYTES: Final = 64
_HKDF_PURPOSE: Final = b"tiered-compactor segment key 1"


class SegmentCipher:
    """AES-256-GCM cipher of one segment. Implements ChunkCipher."""

    def __init__(self, data_key: bytes, aad: bytes) -> None:
        require_pip_extra("aiven", "an encrypted segment")
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._aes = AESGCM(data_key)
        self._aad = aad

    def encrypt(self, iv: bytes, plain: bytes) -> bytes:
        """Encrypt a chunk. Return the initialization vector, the ciphertext and the authentication tag, joined."""
        return iv + self._aes.encrypt(iv, plain, self._aad)

    def decrypt(self, stored: bytes) -> bytes:
        """Decrypt a stored chunk and return its plain bytes. Raises InvalidAivenDataError if the chunk is not authentic."""
        from cryptography.exceptions import InvalidTag

        if len(stored) < ENCRYPTION_OVERHEAD:
            raise InvalidAivenDataError("an encrypted chunk is cut off")
        try:
            return self._aes.decrypt(stored[:IV_BYTES], stored[IV_BYTES:], self._aad)
        except InvalidTag:
            raise InvalidAivenDataError("a chunk is not what was encrypted under the manifest's data key") from None


@dataclass(frozen=True)
class SegmentCipherAndWrappedKey:
    """A segment's cipher, and its data key as the manifest stores it: encrypted (wrapped) with a public key."""

    cipher: SegmentCipher
    key: WrappedSegmentKey


class PrivateKeyRing:
    """Private keys by key pair id, read from their files on first use. Thread-safe.

    :param pem_file_by_key_pair_id: key pair id -> PEM file of the private key (PKCS#8).
    """

    def __init__(self, pem_file_by_key_pair_id: Mapping[str, str]) -> None:
        self._files = pem_file_by_key_pair_id
        self._keys: dict[str, RsaKey] = {}
        self._lock = threading.Lock()

    def unwrap_segment_key(self, key: WrappedSegmentKey) -> SegmentCipher:
        """Unwrap a segment's data key and return its cipher.

        Raises Refused if the private key is missing or does not match, and UsageError if the file holds no private key.
        """
        pair, _, wrapped = key.data_key.partition(":")
        if pair not in self._files:
            known = ", ".join(sorted(self._files)) or "none"
            raise Refused(
                f"it is encrypted for key pair {pair!r}, whose private key is not configured (there: {known})",
                hint=f'Add {pair} = "/path/to/its/private.pem" to key_pairs under [tier.aiven]',
            )
        private = self._private_key(pair)
        from Crypto.Cipher import PKCS1_OAEP
        from Crypto.Hash import SHA3_512

        try:
            data_key = PKCS1_OAEP.new(private, SHA3_512).decrypt(base64.b64decode(wrapped))
        except ValueError as error:
            raise _private_key_mismatch_error(pair, self._files[pair]) from error
        if len(data_key) != DATA_KEY_BYTES:
            raise _private_key_mismatch_error(pair, self._files[pair])
        return SegmentCipher(data_key, base64.b64decode(key.aad))

    def derive_segment_key(self, key_pair_id: str, segment_id: str, chunks_digest: bytes) -> SegmentCipherAndWrappedKey:
        """Return a segment's cipher and wrapped data key, derived from its content. Raises UsageError if the key pair is missing.

        :param key_pair_id: id of the key pair that wraps the segment's data key.
        :param chunks_digest: digest of all chunks that will be encrypted, so that a key is never used for other content.
        """
        private = self._private_key(key_pair_id)
        from Crypto.Cipher import PKCS1_OAEP
        from Crypto.Hash import SHA3_512
        from cryptography.hazmat.primitives.hashes import SHA512
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        secret = private.d.to_bytes((int(private.n).bit_length() + 7) // 8, "big")
        info = b"\0".join((_HKDF_PURPOSE, key_pair_id.encode(), segment_id.encode(), chunks_digest))
        derived = HKDF(SHA512(), DATA_KEY_BYTES + AAD_BYTES + _SEED_BYTES, salt=None, info=info).derive(secret)
        data_key, aad, seed = derived[:DATA_KEY_BYTES], derived[DATA_KEY_BYTES : DATA_KEY_BYTES + AAD_BYTES], derived[-_SEED_BYTES:]
        wrapped = PKCS1_OAEP.new(private.public_key(), SHA3_512, randfunc=lambda size: seed[:size]).encrypt(data_key)
        return SegmentCipherAndWrappedKey(
            SegmentCipher(data_key, aad),
            WrappedSegmentKey(f"{key_pair_id}:{base64.b64encode(wrapped).decode()}", base64.b64encode(aad).decode()),
        )

    def placeholder_segment_key(self, key_pair_id: str) -> WrappedSegmentKey:
        """Return a dummy segment key of the same length as a real one, to compute the manifest's size before the key is known."""
        wrapped = bytes((int(self._private_key(key_pair_id).n).bit_length() + 7) // 8)
        return WrappedSegmentKey(f"{key_pair_id}:{base64.b64encode(wrapped).decode()}", base64.b64encode(bytes(AAD_BYTES)).decode())

    def _private_key(self, key_pair_id: str) -> RsaKey:
        """Return the private key of a pair, read on first use."""
        with self._lock:
            if key_pair_id not in self._keys:
                self._keys[key_pair_id] = _load_private_key(key_pair_id, self._files[key_pair_id])
            return self._keys[key_pair_id]


def derive_chunk_iv(stream_number: int, chunk_number: int) -> bytes:
    """Return the initialization vector of a chunk, which is different for each chunk of a segment.
    :param stream_number: 0 for chunks of the log, 1 for the index files.
    :param chunk_number: counted from 0 within the stream.
    """
    return stream_number.to_bytes(4, "big") + chunk_number.to_bytes(8, "big")


def _load_private_key(key_pair_id: str, pem_file: str) -> RsaKey:
    """Read an RSA private key. Raises UsageError if the file cannot be read or holds no private key."""
    require_pip_extra("aiven", "an encrypted segment")
    from Crypto.PublicKey import RSA

    hint = "key_pairs under [tier.aiven] names, for each id, a PEM file with an RSA private key (PKCS#8)"
    try:
        key = RSA.import_key(Path(pem_file).read_bytes())
    except OSError as error:
        raise UsageError(
            f"the private key of key pair {key_pair_id!r} cannot be read from {pem_file}: {error.strerror}", hint=hint
        ) from error
    except (ValueError, IndexError, TypeError) as error:
        raise UsageError(f"{pem_file}, for key pair {key_pair_id!r}, is not a private key: {error}", hint=hint) from error
    if not key.has_private():
        raise UsageError(f"{pem_file}, for key pair {key_pair_id!r}, is a public key; the private one is needed", hint=hint)
    return key


def _private_key_mismatch_error(key_pair_id: str, pem_file: str) -> Refused:
    """Return the error for a private key that does not unwrap the data key."""
    return Refused(
        f"its data key cannot be unwrapped with {pem_file}, which is configured for key pair {key_pair_id!r}: another key, or the manifest "
        "is damaged",
        hint="Compare key_pairs under [tier.aiven] with the brokers' rsm.config.encryption.key.pairs",
    )
