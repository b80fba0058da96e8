"""`archipelago export`: a run's newest parameters as files that other programs load."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from archipelago.broker.errors import ConfigError, DataError, UnknownRunError, UnreachableError
from archipelago.broker.manifest import Manifest
from archipelago.broker.process import RUN_VARIABLE, URL_VARIABLE, connect_to, keep_compiled, print_json
from archipelago.broker.redis.keys import checked_name
from archipelago.broker.wire import unpack
from archipelago.ops.settings import say
from archipelago.ops.weights.safetensors_files import CONFIG_FILE, ORBAX_FOLDER

if TYPE_CHECKING:
    import jax

    from archipelago.islands.data.tokenizer import TextTokenizer
    from archipelago.islands.models.registry import Params

RUNS = Path("runs")
"""where `up` keeps its runs"""
WEIGHTS_FILE = "model.safetensors"
OWN_KIND = "archipelago"


@dataclass(frozen=True)
class ExportOptions:
    """Write a run's newest parameters for other programs: as Hugging Face's `transformers` loads them, or for Orbax."""

    out: Path
    """the folder to write; it must not be there, or be empty"""
    source: Annotated[str | None, tyro.conf.Positional] = None
    """redis://HOST:PORT and the like (default $ARCHIPELAGO_URL), or name or folder of a run with checkpoints here"""
    run: str | None = None
    """name of the run; default $ARCHIPELAGO_RUN, or the only run there"""
    format: Literal["safetensors", "orbax"] = "safetensors"
    """`orbax` is a tree of arrays under our own names, for JAX"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """of the numbers in the file"""
    json: bool = False
    """print one JSON object"""


@dataclass(frozen=True)
class Found:
    """A run's newest published parameters."""

    manifest: Manifest
    params: Params
    round: int
    step: int
    origin: str
    """where they were found, in words"""


def main(options: ExportOptions) -> int:
    """Finds the parameters and writes them."""
    require_new(options.out)
    found = find(options.source, options.run)
    kind = write(found, options.out, options.format, options.dtype)
    size = sum(path.stat().st_size for path in options.out.rglob("*") if path.is_file())
    if options.json:
        print_json({"run": found.manifest.run, "round": found.round, "step": found.step, "origin": found.origin,
                    "model_type": kind, "format": options.format, "dtype": options.dtype,
                    "parameters": found.manifest.parameters, "bytes": size, "folder": str(options.out)})  # fmt: skip
        return 0
    say(f"run {found.manifest.run!r} at round {found.round:,}, step {found.step:,}, from {found.origin}: "
        f"{found.manifest.parameters:,} parameters, {options.dtype}, in {options.out} ({size:,} bytes)")  # fmt: skip
    for line in _uses(found, options, kind):
        say(f"  {line}")
    return 0


def _uses(found: Found, options: ExportOptions, kind: str) -> Iterator[str]:
    """What can be done with it, and what not."""
    if options.format == "orbax":
        yield f"in JAX:  orbax.checkpoint.StandardCheckpointer().restore('{(options.out / ORBAX_FOLDER).absolute()}')"
        return
    if kind == "llama":
        yield f"elsewhere:  transformers.AutoModelForCausalLM.from_pretrained('{options.out}')"
    else:
        yield (
            f"the tensors have our own names (model_type {OWN_KIND!r}): no other program's model computes the same as "
            f"{found.manifest.config.model.size!r}"
        )
    if has_text(found.manifest):
        yield f"text:  archipelago generate {options.out} --prompt 'Once'"
    yield f"go on from here:  archipelago up --from {options.out} --model.size {found.manifest.config.model.size}"


# where parameters are found


def find(source: str | None, run: str | None) -> Found:
    """The newest published parameters of a run: from its Redis, or from the merger's newest checkpoint in a folder.

    Where no Redis is named or answers, or it has lost the run, from the checkpoints that `up` keeps for the run.
    Raises what says why, when there are none.
    """
    keep_compiled()
    if source is not None and "://" not in source:
        return from_checkpoint(_folder(source), run)
    name = run or os.environ.get(RUN_VARIABLE)
    kept = RUNS / checked_name(name, "the run name") if name else None
    if kept is not None and not (source or os.environ.get(URL_VARIABLE)):
        return from_checkpoint(kept, name)
    try:
        return from_redis(source, run)
    except (UnreachableError, UnknownRunError) as error:
        if kept is None or not _checkpoints(kept):
            raise
        say(f"{error.what.rstrip('.')}: the newest checkpoint in {kept} is read instead")
        return from_checkpoint(kept, name)


def _folder(source: str) -> Path:
    """The folder of that name, or of the run of that name."""
    here, kept = Path(source), RUNS / source
    return kept if "/" not in source and kept.is_dir() and not here.exists() else here


def from_redis(url: str | None, run: str | None) -> Found:
    """What the merger published last. Raises BrokerError."""
    transport = connect_to(url, run)
    try:
        manifest = transport.reader.manifest()

        from archipelago.islands.evaluation import published

        return Found(manifest, *published(transport, manifest), "its Redis")
    finally:
        transport.close()


def from_checkpoint(folder: Path, run: str | None) -> Found:
    """What the newest checkpoint in a run's folder, its merger's or its checkpoints' holds. Raises ConfigError."""
    from archipelago.merger.checkpoint import CheckpointStore

    place = _checkpoints(folder)
    image = CheckpointStore(place).load() if place else None
    if place is None or image is None:
        raise ConfigError(
            f"there is no Redis named, and no checkpoint in {folder}",
            "Name the run's Redis (redis://HOST:PORT), or a folder that `up` or the merger wrote, such as runs/demo.",
        )
    manifest = image.manifest
    if run and manifest.run != run:
        raise UnknownRunError(f"{place} holds checkpoints of run {manifest.run!r}, not of {run!r}", "Name that run.")

    from archipelago.islands.evaluation import assemble

    vectors = [unpack(payload, size) for (_, payload), size in zip(image.snapshots, manifest.sizes, strict=True)]
    step = max(snapshot.step for snapshot, _ in image.snapshots)
    return Found(manifest, assemble(manifest, vectors), image.round, step, f"checkpoint {image.number} in {place}")


def _checkpoints(folder: Path) -> Path | None:
    """The folder of checkpoints that is meant."""
    from archipelago.merger.checkpoint import CheckpointStore

    places = (folder / "merger" / "checkpoints", folder / "checkpoints", folder)
    return next((place for place in places if CheckpointStore(place).numbers()), None)


def has_text(manifest: Manifest) -> bool:
    """Whether the run's model reads and writes text."""
    from archipelago.islands.models.registry import build

    return build(manifest.config.model).decoder is not None


def tokenizer_of(manifest: Manifest) -> TextTokenizer:
    """What makes tokens for the run's model. Raises DataError unless this machine has the corpus that holds it."""
    from archipelago.islands.data.corpus import open_corpus
    from archipelago.islands.data.tokenizer import byte_tokenizer

    if not manifest.corpus.tokenizer:
        return byte_tokenizer()
    corpus = open_corpus(manifest.corpus.name)
    if corpus.tokenizer != manifest.corpus.tokenizer:
        raise DataError(
            f"the corpus {corpus.name!r} on this machine has another tokenizer than the run's",
            "Copy the run's corpus here.",
        )
    return corpus.open_tokenizer()


# how they are written


def require_new(out: Path) -> None:
    """Raises ConfigError when something is there already."""
    try:
        taken = out.exists() and (not out.is_dir() or any(out.iterdir()))
    except OSError as error:
        raise ConfigError(f"{out} cannot be written ({error.strerror})", "Name another folder with --out.") from None
    if taken:
        raise ConfigError(f"{out} is there already, and not empty", "Name another folder with --out, or delete it.")


def write(found: Found, out: Path, form: str, dtype: str) -> str:
    """Writes the folder, whole or not at all; the model type, `llama` or our own. Raises ConfigError."""
    tokenizer = tokenizer_of(found.manifest) if has_text(found.manifest) else None
    config = config_of(found, dtype)
    with _staged(out) as stage:
        _write_json(stage / CONFIG_FILE, config)
        if form == "orbax":
            _write_orbax(stage / ORBAX_FOLDER, found.params, dtype)
        else:
            path = stage / WEIGHTS_FILE
            _write_safetensors(path, found.params, dtype, llama=config["model_type"] == "llama")
            path.chmod((stage / CONFIG_FILE).stat().st_mode)  # the library lets only its user read it
        if tokenizer is not None:
            _write_tokenizer(stage, tokenizer, found.manifest.config.data.sequence_length)
    return str(config["model_type"])


@contextmanager
def _staged(out: Path) -> Iterator[Path]:
    """A folder beside `out` that becomes it."""
    from safetensors import SafetensorError

    stage = out.absolute().parent / f".{out.name}-{secrets.token_hex(8)}"
    try:
        stage.mkdir(parents=True)
        yield stage
        stage.rename(out)  # over an empty folder as well
    except (OSError, SafetensorError) as error:  # the latter hides the former
        raise ConfigError(
            f"{out} cannot be written ({getattr(error, 'strerror', None) or error})",
            "Check the path, the disk's space and rights.",
        ) from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def config_of(found: Found, dtype: str) -> dict[str, Any]:
    """`config.json`: that of a Llama where the model is one, else our own; and in both where it comes from."""
    from archipelago.islands.models.llama import config_of as llama_config
    from archipelago.islands.models.registry import MODELS

    manifest = found.manifest
    model, positions = manifest.config.model, manifest.config.data.sequence_length
    origin = {"size": model.size, "vocabulary": model.vocabulary, "sequence_length": positions, "run": manifest.run,
              "round": found.round, "step": found.step, "corpus": manifest.corpus.name,
              "corpus_digest": manifest.corpus.digest, "config_digest": manifest.config.digest()}  # fmt: skip
    if size := MODELS[model.size].dense:
        return {**llama_config(size, model.vocabulary, positions, dtype), OWN_KIND: origin}
    return {"model_type": OWN_KIND, "torch_dtype": dtype, OWN_KIND: origin}


def _cast(params: Params, dtype: str) -> dict[str, jax.Array]:
    import jax.numpy as jnp

    return {name: value.astype(jnp.dtype(dtype)) for name, value in params.items()}


def _write_safetensors(path: Path, params: Params, dtype: str, *, llama: bool) -> None:
    from safetensors.flax import save_file

    from archipelago.islands.models.llama import to_llama

    tensors = {}
    for name, value in _cast(params, dtype).items():
        place = to_llama(name) if llama else None
        tensors[place.name if place else name] = value.T if place and place.transposed else value
    save_file(tensors, str(path), metadata={"format": "pt"})


def _write_orbax(path: Path, params: Params, dtype: str) -> None:
    import orbax.checkpoint as ocp

    tree: dict[str, Any] = {}
    for name, value in _cast(params, dtype).items():
        *parents, leaf = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path.absolute(), tree)


def _write_tokenizer(folder: Path, tokenizer: TextTokenizer, positions: int) -> None:
    from archipelago.islands.data.tokenizer import FILE

    (folder / FILE).write_text(tokenizer.to_json(), encoding="utf-8", newline="\n")
    _write_json(folder / "tokenizer_config.json",
                {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": positions,
                 "clean_up_tokenization_spaces": False, "add_bos_token": False, "add_eos_token": False})  # fmt: skip
    _write_json(folder / "generation_config.json",
                {"do_sample": True, "temperature": 0.8, "bos_token_id": None, "eos_token_id": None})  # fmt: skip


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
