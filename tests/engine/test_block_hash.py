"""The hash by which blocks of the KV cache are found: SHA-256 where it is asked for."""

from __future__ import annotations

import hashlib
import hmac
from array import array

import pytest

from quire.config.cache import CacheConfig
from quire.kvcache.block_hash import Hasher
from quire.protocol.request import MediaItem

SECRET = b"s" * 32
TOKENS = list(range(40))


def test_sha256_is_the_hmac_of_parent_and_tokens():
    hasher = Hasher(16, SECRET, "bfloat16", "sha256")
    root, hashes = hasher.root("salt", None), []
    hasher.extend(hashes, root, TOKENS)
    expected = [hmac.new(SECRET, b"bfloat16:4:salt", hashlib.sha256).digest()]
    for start in (0, 16):
        content = expected[-1] + array("q", TOKENS[start : start + 16]).tobytes()
        expected.append(hmac.new(SECRET, content, hashlib.sha256).digest())
    assert [root, *hashes] == expected


@pytest.mark.parametrize("algorithm", ["blake2b", "sha256"])
def test_a_hash_depends_on_the_secret_and_all_before(algorithm):
    def last(tokens, secret=SECRET, salt=""):
        hasher, hashes = Hasher(16, secret, algorithm=algorithm), []
        hasher.extend(hashes, hasher.root(salt, None), tokens)
        return hashes[-1]

    changed = [99, *TOKENS[1:]]
    values = {last(TOKENS), last(changed), last(TOKENS, b"t" * 32), last(TOKENS, salt="a")}
    assert len(values) == 4
    assert last(TOKENS) == last(TOKENS)


@pytest.mark.parametrize(
    ("name", "algorithm"),
    [("blake2b", "blake2b"), ("builtin", "blake2b"), ("xxhash", "blake2b"), ("xxhash_cbor", "blake2b"), ("sha256", "sha256"), ("sha256_cbor", "sha256")],
)  # fmt: skip
def test_each_name_of_vllm_means_one_of_the_two(name, algorithm):
    assert CacheConfig(prefix_caching_hash_algo=name).hash_algorithm == algorithm


def test_a_block_depends_on_the_media_that_overlap_it():
    """Items of 5 tokens, with a gap: each block has those with a token in it, at their places."""
    hasher, tokens = Hasher(4, SECRET), [0] * 32

    def hashes(changed=None, shift=0):
        names = {start: "x" if start == changed else "m" for start in (2, 7, 20)}
        media = [MediaItem(name, "image", start + shift, 5) for start, name in names.items()]
        found = []
        hasher.extend(found, b"root", tokens, media)
        whole = []
        for end in range(4, 33, 4):  # as a request grows
            hasher.extend(whole, b"root", tokens[:end], media)
        assert whole == found
        return found

    def equal(one, other):
        return [a == b for a, b in zip(one, other, strict=True)].index(False)

    plain = hashes()
    assert [equal(plain, hashes(changed)) for changed in (2, 7, 20)] == [0, 1, 5]
    assert equal(plain, hashes(shift=1)) == 0
    bare = []
    hasher.extend(bare, b"root", tokens)
    assert equal(plain, bare) == 0
