"""Hashes: the vectors, hand-worked values, the same inside JAX programs, and chains that a backend writes."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.backends import BACKENDS
from helpers.states import fields, fresh_buffer, fresh_state
from helpers.vectors import load_vectors
from jax_kvcanary import hashing, reference
from jax_kvcanary.constants import CANARY_CHAIN_ANCHOR, CanaryLaunchTag, RealKvHashMode
from jax_kvcanary.plan import WritePlan
from jax_kvcanary.sources import RealKvSource
from jax_kvcanary.state import from_int64, to_int64

HASHES = load_vectors("hash")


def test_splitmix64_vectors():
    for x, want in HASHES["splitmix64"]:
        assert reference.splitmix64(int(x)) == int(want)


def test_mix3_vectors():
    for a, b, c, want in HASHES["mix3"]:
        assert reference.mix3(int(a), int(b), int(c)) == int(want)


def test_zero_is_a_fixed_point():
    assert reference.splitmix64(0) == 0
    assert reference.mix3(0, 0, 0) == 0


def test_ints_are_taken_modulo_two_to_the_64():
    assert reference.splitmix64(-1) == reference.splitmix64(2**64 - 1) == reference.splitmix64(2**65 - 1)
    assert reference.splitmix64(np.int64(-1)) == reference.splitmix64(np.uint64(2**64 - 1))
    assert reference.mix3(-(2**63), -2, 2**64 + 3) == reference.mix3(2**63, 2**64 - 2, 3)
    assert type(reference.splitmix64(np.int32(5))) is int


def test_arrays_hash_like_their_ints():
    words = np.random.default_rng(11).integers(-(2**63), 2**63, (3, 7, 5))
    for x in (words, words.view(np.uint64)):
        a, b, c = x
        kept = x.copy()
        got = reference.splitmix64(x)
        assert (got.dtype, got.shape) == (np.uint64, x.shape)
        assert got.reshape(-1).tolist() == [reference.splitmix64(word) for word in x.reshape(-1).tolist()]
        flat = [word.reshape(-1).tolist() for word in x]
        assert reference.mix3(a, b, c).reshape(-1).tolist() == [reference.mix3(*abc) for abc in zip(*flat, strict=True)]
        assert reference.mix3(-3, b, 7).reshape(-1).tolist() == [reference.mix3(-3, word, 7) for word in flat[1]]
        np.testing.assert_array_equal(x, kept)


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.float64, object])
def test_arrays_of_other_types_are_refused(dtype):
    with pytest.raises(TypeError, match=rf"^`x` has dtype {np.dtype(dtype)}, but it must be int64 or uint64\.$"):
        reference.splitmix64(np.ones(3, dtype))


@pytest.mark.parametrize("bad", [1.0, "1", None, True, np.float32(1), [1]])
def test_other_types_are_refused(bad):
    with pytest.raises(TypeError, match=r"^`x` is .* but it must be an int\.$"):
        reference.splitmix64(bad)
    for name, args in {"a": (bad, 1, 1), "b": (1, bad, 1), "c": (1, 1, bad)}.items():
        with pytest.raises(TypeError, match=rf"^`{name}` is .* but it must be an int\.$"):
            reference.mix3(*args)


def test_slot_hash_leaves_the_real_kv_hash_out():
    buf = fresh_buffer(3)
    fields(buf)[1] = (7, 5, -3, 1234)
    want = reference.mix3(-3, 7, 5)
    assert reference.slot_hash(buf, 1) == want
    fields(buf)[1, 3] = 0
    assert reference.slot_hash(buf, 1) == want
    assert reference.slot_hash(buf, -1) == reference.slot_hash(buf, -9) == reference.splitmix64(CANARY_CHAIN_ANCHOR)


def test_real_kv_hash_by_hand():
    words = np.array([[10, 11, 12], [20, 21, 22]], "<u8")
    source = RealKvSource(array=words, num_bytes_per_token=24, read_bytes=24)
    mix = reference.splitmix64
    first_two = mix(mix(20) ^ 21)
    all_three = mix(first_two ^ 22)
    assert reference.source_hash(source, 1, RealKvHashMode.PARTIAL) == first_two
    assert reference.source_hash(source, 1, RealKvHashMode.ALL) == all_three
    assert reference.real_kv_hash((source,), 1, RealKvHashMode.ALL) == mix(all_three)
    assert reference.real_kv_hash((source, source), 1, RealKvHashMode.PARTIAL) == mix(mix(first_two) ^ first_two)
    assert reference.real_kv_hash((source,), 1, RealKvHashMode.NONE) == reference.real_kv_hash((), 1, RealKvHashMode.ALL) == 0


def test_source_geometry_by_hand():
    # Pages of two slots, 5 words apart, slots 2 words apart, behind one word: slot 3 is word 1 + 5 + 2.
    source = RealKvSource(
        array=np.arange(100, 120, dtype="<u8"),
        page_size=2,
        num_bytes_per_token=8,
        read_bytes=8,
        byte_offset=8,
        row_stride_bytes=40,
        token_stride_bytes=16,
    )
    for slot, word in enumerate([101, 103, 106, 108, 111]):
        assert reference.source_hash(source, slot, RealKvHashMode.ALL) == reference.splitmix64(word)


# The same functions in jnp, on word pairs.

EDGES = [0, 1, -1, 2, 2**31 - 1, 2**31, -(2**31), 2**32 - 1, 2**32, -(2**32), 0xFFFF, 0x10000, 2**63 - 1, -(2**63)]


@pytest.fixture(params=["eager", "jit", "eager_x64", "jit_x64"])
def run(request):
    """How to call a function of words."""

    def call(function, *args):
        with jax.enable_x64(request.param.endswith("x64")):
            return np.asarray((jax.jit(function) if request.param.startswith("jit") else function)(*args))

    return call


def words_of_ints(values):
    return from_int64([reference.hashes.to_signed(int(value)) for value in values])


def test_words_agree_with_the_vectors(run):
    x, want = zip(*HASHES["splitmix64"], strict=True)
    np.testing.assert_array_equal(run(hashing.splitmix64, words_of_ints(x)), words_of_ints(want))
    *abc, want = zip(*HASHES["mix3"], strict=True)
    np.testing.assert_array_equal(run(hashing.mix3, *map(words_of_ints, abc)), words_of_ints(want))


def test_words_agree_with_the_reference(run):
    a, b, c = np.random.default_rng(3).integers(-(2**63), 2**63, (3, 1009))
    a[: len(EDGES)], b[: len(EDGES)], c[: len(EDGES)] = EDGES, EDGES[::-1], EDGES
    got = run(hashing.splitmix64, from_int64(a))
    np.testing.assert_array_equal(got, words_of_ints(map(reference.splitmix64, a)))
    got = run(hashing.mix3, from_int64(a), from_int64(b), from_int64(c))
    np.testing.assert_array_equal(got, words_of_ints(map(reference.mix3, a, b, c)))
    np.testing.assert_array_equal(
        run(hashing.mix3, from_int64(7), from_int64(b), from_int64(-9)), words_of_ints(reference.mix3(7, word, -9) for word in b)
    )
    assert got.dtype == np.uint32


@pytest.mark.parametrize("bound", [1, 2, 3, 32003, 65536, 2**31 - 1])
def test_hashes_below_a_bound(run, bound):
    words = np.concatenate([np.random.default_rng(bound).integers(-(2**63), 2**63, 499), EDGES])
    got = run(partial(hashing.scale_below, bound=bound), from_int64(words))
    np.testing.assert_array_equal(got, [int(word) % 2**64 * bound >> 64 for word in words])
    assert got.dtype == np.int32


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_integers_become_words_without_change_of_value(dtype, x64):
    values = np.array([value for value in EDGES if np.iinfo(dtype).min <= value <= np.iinfo(dtype).max], dtype)
    with jax.enable_x64(x64):
        words = hashing.words_of(values.reshape(2, -1))
    assert words.shape == (2, len(values) // 2, 2)
    np.testing.assert_array_equal(to_int64(words).reshape(-1), values)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: hashing.words_of(jnp.ones(3)), TypeError, "`values` has dtype float32, but it must be int32 or int64."),
        (lambda: hashing.words_of(3), TypeError, "`values` is of type int, but it must be an array."),
        (lambda: hashing.splitmix64(np.ones((3, 2), np.int32)), TypeError, "`words` has dtype int32, but it must be uint32."),
        (
            lambda: hashing.splitmix64(np.ones((2, 3), np.uint32)),
            ValueError,
            "`words` has shape [2, 3], but a word of two halves in the last axis needs shape [any, 2].",
        ),
        (
            lambda: hashing.mix3(np.ones(2, np.uint32), np.uint32(1), np.ones(2, np.uint32)),
            ValueError,
            "`b` has shape [], but a word of two halves in the last axis needs shape [2].",
        ),
        (
            lambda: hashing.scale_below(np.ones(2, np.uint32), 2**31),
            ValueError,
            "`bound` is 2147483648, but it must be between 1 and 2147483647.",
        ),
    ],
)
def test_what_is_no_word_is_refused(call, error, text):
    with pytest.raises(error) as caught:
        call()
    assert (type(caught.value), str(caught.value)) == (error, text)


@pytest.mark.parametrize("backend_name", BACKENDS)
def test_chain_vector(get_backend, backend_name):
    """Writing the tokens of the chain, in two launches, gives its records."""
    backend = get_backend(backend_name)
    chain = np.array([[link["token"], link["position"], link["prev_hash"], 0] for link in HASHES["chain"]])
    slots = np.random.default_rng(7).permutation(np.arange(1, len(chain) + 1))
    buf, state = backend.array(fresh_buffer(len(chain) + 1)), backend.own(fresh_state(5))
    split = 37
    with backend.active():
        for part, seed in ((slice(0, split), -1), (slice(split, None), slots[split - 1])):
            ids, positions, _, _ = chain[part].T
            plan = WritePlan(*(backend.array(np.array(v, np.int32)) for v in ([0, len(ids)], [seed], [1])))
            buf, state = backend.write_step(
                buf,
                plan,
                backend.ints(ids),
                backend.ints(positions),
                backend.ints(slots[part]),
                state,
                tag=CanaryLaunchTag.HEAD_K_FULL,
            )
    np.testing.assert_array_equal(fields(buf)[slots], chain)
    assert int(np.asarray(state.violation_log.violation_write_index)[0]) == 0
