"""The manifest: balanced fragments, contiguous offsets, and mismatches that name both values."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from archipelago.broker.config import OWN_MODEL, ModelConfig, RunConfig
from archipelago.broker.errors import ConfigError, MismatchError
from archipelago.broker.frozen import FrozenTensor
from archipelago.broker.manifest import NO_CORPUS, Corpus, Manifest, Tensor, balanced
from tests import samples
from tests.failing import failing

MANIFEST = samples.manifest()
SIZES = st.lists(st.integers(1, 1000), min_size=1, max_size=60)


def tensors_of(sizes: Sequence[int]) -> list[Tensor]:
    return [Tensor(f"t{index}", (size,)) for index, size in enumerate(sizes)]


def loads(tensors: Sequence[Tensor], fragments: Sequence[Sequence[str]]) -> list[int]:
    size = {tensor.name: tensor.size for tensor in tensors}
    return [sum(size[name] for name in names) for names in fragments]


@given(st.data(), SIZES, st.integers(1, 20))
def test_every_tensor_is_in_one_fragment_and_none_is_empty(data: st.DataObject, sizes: list[int], count: int) -> None:
    tensors = tensors_of(sizes)
    fragments = balanced(tensors, count)
    assert sorted(name for names in fragments for name in names) == sorted(tensor.name for tensor in tensors)
    assert len(fragments) == min(count, len(sizes))
    assert all(fragments)
    assert balanced(data.draw(st.permutations(tensors)), count) == fragments, "the order of the tensors matters"
    # This bound holds for every greedy split: the last tensor goes to the lightest bin, below the mean.
    peak = max(loads(tensors, fragments))
    assert len(fragments) * peak <= sum(sizes) + (len(fragments) - 1) * max(sizes)


def test_balanced_by_hand() -> None:
    tensors = [Tensor(name, (size,)) for name, size in zip("abcde", (3, 3, 2, 2, 2), strict=True)]
    assert balanced(tensors, 2) == (("a", "c", "e"), ("b", "d"))
    assert balanced(tensors[:2], 6) == (("a",), ("b",))


@given(SIZES, st.integers(1, 8))
def test_offsets_are_contiguous(sizes: list[int], count: int) -> None:
    tensors = tuple(tensors_of(sizes))
    manifest = replace(MANIFEST, tensors=tensors, fragments=balanced(tensors, count))
    assert manifest.parameters == sum(sizes)
    for names, rows, size in zip(manifest.fragments, manifest.layout, manifest.sizes, strict=True):
        assert tuple(tensor.name for tensor, _ in rows) == names
        ends = [offset + tensor.size for tensor, offset in rows]
        assert [offset for _, offset in rows] == [0, *ends[:-1]]
        assert ends[-1] == size


def test_rounds_cycle_through_the_fragments() -> None:
    fragments = tuple((name,) for name in "abc")
    manifest = replace(MANIFEST, tensors=tuple(Tensor(name, (2,)) for name in "abc"), fragments=fragments)
    assert [manifest.fragment_of(t) for t in range(1, 8)] == [0, 1, 2, 0, 1, 2, 0]
    assert [manifest.version_after(t) for t in range(1, 8)] == [1, 1, 1, 2, 2, 2, 3]
    assert [MANIFEST.version_after(t) for t in range(1, 6)] == [1, 1, 2, 2, 3]
    assert [[MANIFEST.version_at(closed, p) for closed in range(5)] for p in range(2)] == [
        [0, 1, 1, 2, 2],
        [0, 0, 1, 1, 2],
    ]
    assert [MANIFEST.round_of(version, 1) for version in range(3)] == [0, 2, 4]
    assert [Tensor("matrix", (3, 5)).size, Tensor("scalar", ()).size] == [15, 1]


@given(
    st.lists(st.tuples(st.lists(st.integers(1, 5), max_size=3), st.sampled_from(["embedding", "rest"])), min_size=1),
    st.integers(1, 5),
    st.dictionaries(st.text(), st.text()),
)
def test_fields_are_lossless(shapes: list[Any], count: int, versions: dict[str, str]) -> None:
    tensors = tuple(Tensor(f"layer.{index}", tuple(shape), kind) for index, (shape, kind) in enumerate(shapes))
    manifest = Manifest("run", RunConfig(seed=3), tensors, balanced(tensors, count), Corpus("c", "0" * 32, 9), versions)
    fields = manifest.to_fields()
    assert all(type(text) is str for text in fields.values())
    assert Manifest.from_fields(fields) == manifest


def bent_config(**changes: object) -> str:
    return json.dumps({**json.loads(MANIFEST.config.to_json()), **changes})


TENSORS = json.loads(MANIFEST.to_fields()["tensors"])
FRAGMENTS = json.loads(MANIFEST.to_fields()["fragments"])
#: Texts that are not JSON or of another type, and tensors, fragments and frozen tensors that contradict each other.
DAMAGED: dict[str, list[str]] = {
    "config": ["", "{}", bent_config(seed=-1), bent_config(seed=1), bent_config(later=1), "[" * 100_000],
    "config_digest": ["0" * 16],
    "tensors": [
        "",
        json.dumps(TENSORS[:-1]),
        json.dumps([*TENSORS, ["more", [1], "rest"]]),
        json.dumps([["embedding", [8, 5], "embedding"], *TENSORS[1:]]),
        json.dumps([["embedding", [0], "embedding"], *TENSORS[1:]]),
        json.dumps([["embedding", ["x"], "embedding"], *TENSORS[1:]]),
        json.dumps([["embedding", [8, 4], "other"], *TENSORS[1:]]),
    ],
    "fragments": [
        "",
        "[]",
        json.dumps([*FRAGMENTS, []]),
        json.dumps(FRAGMENTS[:1]),
        json.dumps([*FRAGMENTS, ["nobody"]]),
        json.dumps([*FRAGMENTS, FRAGMENTS[0]]),
        json.dumps(FRAGMENTS[::-1]),
    ],
    "frozen": [
        "",
        '[["base", [4], "float32", "short"]]',
        json.dumps([["base", [0], "float32", "0" * 32]]),
        json.dumps([["base", [4], "float 32", "0" * 32]]),
        json.dumps([["embedding", [4], "float32", "0" * 32]]),
    ],
    "tree_digest": ["0" * 16],
    "corpus": ["", '["text"]', '["text", "0", "many"]', '["text", "0", 1e999]'],
    "versions": ["", "7", '"text"'],
}


def test_a_damaged_field_is_an_error() -> None:
    for key, text in [(key, text) for key, texts in DAMAGED.items() for text in texts]:
        with pytest.raises(ConfigError):
            pytest.fail(f"{key}: {text[:99]} was read: {Manifest.from_fields({**MANIFEST.to_fields(), key: text})}")


def test_text_that_is_not_json_is_damage() -> None:
    for key in ("config", "tensors"):
        with failing(ConfigError, "config.manifest") as caught:
            Manifest.from_fields({**MANIFEST.to_fields(), key: "{x"})
        assert "archipelago merger --resume" in caught.value.remedy, key


def test_a_run_of_several_shards_with_rounds_of_their_own_is_refused() -> None:
    for shards in (1, 2):
        own = replace(samples.manifest(), shards=shards).of_shard(0)
        fields = own.to_fields()
        assert Manifest.from_fields(fields).of_shard(0) == own
        fields["format"] = "0.3"  # as in a checkpoint of an earlier version
        if shards == 1:
            Manifest.from_fields(fields)
            continue
        with failing(ConfigError, "config.format"):
            Manifest.from_fields(fields)


def test_frozen_tensors_belong_to_the_identity_of_a_run() -> None:
    frozen = (FrozenTensor("base", (2, 3), "bfloat16", "0" * 32),)
    manifest = replace(MANIFEST, frozen=frozen)
    assert Manifest.from_fields(manifest.to_fields()) == manifest
    assert manifest.frozen_parameters == 6
    assert manifest.tree_digest != MANIFEST.tree_digest
    forged = replace(MANIFEST, tensors=(Tensor("other", (4,)),), fragments=(("other",),)).to_fields()
    for fields in ({**manifest.to_fields(), "frozen": "[]"}, {**forged, "tree_digest": MANIFEST.tree_digest}):
        with failing(ConfigError, "config.manifest"):
            Manifest.from_fields(fields)


def test_a_missing_field_is_an_error_that_names_it() -> None:
    """A checkpoint of an earlier version has one shard, and no fields for shards, the format and the model's config."""
    for key in MANIFEST.to_fields():
        fields = MANIFEST.to_fields()
        del fields[key]
        if key in ("shards", "format", "model_config"):
            assert Manifest.from_fields(fields) == MANIFEST
            continue
        with failing(ConfigError, "config.manifest") as caught:
            Manifest.from_fields(fields)
        assert key in str(caught.value)


def test_an_invalid_run_name_is_refused() -> None:
    """Reports and checkpoints are written to folders of that name."""
    for run in ("", "../../etc", "a b", "x" * 65):
        with failing(ConfigError, "config.manifest"):
            Manifest.from_fields({**MANIFEST.to_fields(), "run": run})


def disagreement(ours: Manifest) -> MismatchError:
    with pytest.raises(MismatchError) as caught:
        MANIFEST.require_same(ours)
    assert caught.value.remedy
    assert str(caught.value.run_value) in str(caught.value)
    assert str(caught.value.worker_value) in str(caught.value)
    return caught.value


def test_a_config_mismatch_names_both_values() -> None:
    MANIFEST.require_same(replace(MANIFEST, versions={"jax": "another"}))
    config = replace(MANIFEST.config, sync=replace(MANIFEST.config.sync, interval=99))
    error = disagreement(replace(MANIFEST, config=config))
    assert error.subject == "config"
    assert MANIFEST.config.digest() in str(error)
    assert config.digest() in str(error)
    assert "sync.interval: 24 → 99" in str(error)


def test_a_mismatch_of_trees_or_corpora_names_both_values() -> None:
    ours = samples.manifest(width=5)
    error = disagreement(ours)
    assert error.subject == "tree of tensors"
    assert MANIFEST.tree_digest in str(error.run_value)
    assert ours.tree_digest in str(error.worker_value)
    assert "('embedding', (8, 4))" in str(error.run_value)
    assert "('embedding', (8, 5))" in str(error.worker_value)
    kinds = (MANIFEST.tensors[0]._replace(kind="rest"), *MANIFEST.tensors[1:])
    for other in (replace(MANIFEST, fragments=MANIFEST.fragments[::-1]), replace(MANIFEST, tensors=kinds)):
        error = disagreement(other)
        assert error.subject == "tree of tensors"
        assert error.run_value != error.worker_value
    for corpus in (Corpus("text", "1" * 32, 1000), Corpus("text", "0" * 32, 1001)):
        error = disagreement(replace(MANIFEST, corpus=corpus))
        assert error.subject == "corpus 'text'"
        assert error.run_value == f"{'0' * 32} (1,000 bytes)"
        assert error.worker_value == f"{corpus.digest} ({corpus.bytes:,} bytes)"


def test_a_run_of_user_loops_is_stored_and_says_what_is_impossible() -> None:
    ours = samples.manifest()
    config = replace(ours.config, model=ModelConfig(size=OWN_MODEL))
    own = replace(ours, config=config, corpus=NO_CORPUS)
    assert Manifest.from_fields(own.to_fields()) == own
    assert own.config.has_user_loops
    assert not ours.config.has_user_loops
    ours.require_own_code("Anything")
    with failing(ConfigError, "model.own"):
        own.require_own_code("Generating text")
