"""Read weights from safetensors files: our own exports, and Llamas with our architecture. They are checked first.

So is the tokenizer that they were trained with. Under another one, every token would mean something else to them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archipelago.broker.errors import ConfigError, DataError, few_of
from archipelago.broker.manifest import Tensor

if TYPE_CHECKING:
    from archipelago.islands.data.corpus import OpenCorpus
    from archipelago.islands.models.interface import Params

CONFIG_FILE, INDEX_FILE = "config.json", "model.safetensors.index.json"
#: The `model_type` in `config.json` of models that other programs do not have, and the key of our own settings there.
OWN_KIND = "archipelago"
#: Where an export says which tokenizer its weights were trained with, in the metadata of the file.
TOKENIZER_KEY = "archipelago.tokenizer"
_CONFIG_BYTES_MAX = 16 << 20
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
#: A table that older programs store with the weights.
_NOT_WEIGHTS = "rotary_emb.inv_freq"


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file. `name` is its name in that file."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    transposed: bool

    @property
    def our_shape(self) -> tuple[int, ...]:
        """Its shape in our layout."""
        return self.shape[::-1] if self.transposed else self.shape


class WeightFiles:
    """The tensors of a file, or of all `*.safetensors` of a folder, by our names. Opening reads only the headers.

    Attributes:
        tokenizer: The `meaning` of the tokenizer that the weights were trained with; empty if they do not say it.

    Raises:
        DataError: There are none (`weights.missing`), or a header is damaged (`weights.damaged`).
        ConfigError: A `config.json` beside them describes a Llama that our transformer cannot be (`llama.different`).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = path if path.is_dir() else path.parent
        self.tokenizer = ""
        self.files = files_at(path)
        self.config = read_config(self.folder)
        if self.config.get("model_type") == "llama":
            from archipelago.islands.models.llama import require_compatible

            require_compatible(self.config)
        self.held: dict[str, FileTensor] = {}
        for file in self.files:
            self._read_header(file)

    def _read_header(self, file: Path) -> None:
        from safetensors import SafetensorError, safe_open

        from archipelago.islands.models.llama import from_llama

        try:
            with safe_open(file, framework="numpy") as opened:
                self.tokenizer = (opened.metadata() or {}).get(TOKENIZER_KEY, self.tokenizer)
                for name in opened.keys():  # noqa: SIM118 - it is not a mapping
                    place, part = from_llama(name), opened.get_slice(name)
                    held = FileTensor(file, name, tuple(part.get_shape()), part.get_dtype(), place.transposed)
                    if place.name in self.held:
                        raise DataError(
                            f"{self.path} holds the tensor {place.name!r:.80} twice",
                            "Name one file.",
                            code="weights.damaged",
                        )
                    self.held[place.name] = held
        except (SafetensorError, OSError, ValueError) as error:
            raise damaged(file, error) from None

    def require(self, tensors: Sequence[Tensor]) -> None:
        """Raise DataError (`weights.unfit`) if tensors are missing, unknown, or of another shape or dtype."""
        from archipelago.islands.models.llama import OUTPUT

        wanted = {tensor.name: tensor.shape for tensor in tensors}
        spare = {OUTPUT} if "embedding" in self.held else set[str]()
        unknown = [name for name in self.held.keys() - wanted.keys() - spare if not name.endswith(_NOT_WEIGHTS)]
        both = [(self.held[name], shape) for name, shape in wanted.items() if name in self.held]
        faults = {
            "missing": [name for name in wanted if name not in self.held],
            "not in the model": sorted(self.held[name].name for name in unknown),
            "of another shape": [
                f"{held.name} is {_shape(held.our_shape)} instead of {_shape(shape)}"
                for held, shape in both
                if held.our_shape != shape
            ],
            "not floating-point": [f"{held.name} is {held.dtype}" for held, _ in both if held.dtype not in _FLOATS],
        }
        found = [f"{len(names):,} {fault} ({_some(names)})" for fault, names in faults.items() if names]
        if found:
            raise DataError(
                f"the weights in {self.path} do not fit the model: {'; '.join(found)}",
                self._remedy(wanted),
                code="weights.unfit",
            )

    def _remedy(self, wanted: Mapping[str, tuple[int, ...]]) -> str:
        """Return what to do when tensors do not fit."""
        ours, theirs = wanted.get("embedding", ()), self.held.get("embedding")
        if theirs and len(ours) == 2 and len(theirs.our_shape) == 2:
            rows, width = theirs.our_shape
            if rows > ours[0] and width == ours[1]:
                return f"Set --model.vocabulary {rows}: the weights have room for more tokens than the tokenizer has."
        return "Choose the --model.size, and the --data.corpus with the vocabulary, that they were trained with."

    def load(self, tensors: Sequence[Tensor]) -> Params:
        """Read these tensors as float32, in our layout. Raises DataError as `require`, and `weights.not-finite`."""
        import jax.numpy as jnp
        from safetensors import SafetensorError, safe_open

        from archipelago.islands.models.llama import OUTPUT

        self.require(tensors)
        wanted = [tensor.name for tensor in tensors]
        params: Params = {}
        output = None
        for file in self.files:
            try:
                with safe_open(file, framework="flax") as opened:
                    for name in [*wanted, OUTPUT]:
                        if name in self.held and self.held[name].file == file:
                            value = opened.get_tensor(self.held[name].name).astype(jnp.float32)
                            params[name] = value.T if self.held[name].transposed else value
                    output = params.pop(OUTPUT, output)
            except (SafetensorError, OSError, ValueError) as error:
                raise damaged(file, error) from None
        if output is not None and not jnp.array_equal(output, params["embedding"]):
            raise DataError(
                f"the weights in {self.path} do not fit the model: {OUTPUT} is not the embedding",
                "Our models use the embedding as the output projection too. Name weights with tied embeddings.",
                code="weights.unfit",
            )
        broken = [self.held[name].name for name, value in params.items() if not bool(jnp.all(jnp.isfinite(value)))]
        if broken:
            raise DataError(
                f"the weights in {self.path} hold NaN or infinity, in {len(broken):,} tensors ({_some(broken)})",
                "The model had diverged. Name another file.",
                code="weights.not-finite",
            )
        return dict(sorted(params.items()))


def files_at(path: Path) -> list[Path]:
    """Return the files of weights in a folder, or the file itself. Raises DataError (`weights.missing`) or OSError."""
    index = _json_at(path / INDEX_FILE).get("weight_map") if path.is_dir() else None
    named = {str(name) for name in index.values()} if isinstance(index, dict) else set()
    if missing := sorted(name for name in named if not (path / name).is_file()):
        raise DataError(
            f"{path} lacks {few_of(missing)}, of {INDEX_FILE}", "Copy the whole folder again.", code="weights.missing"
        )
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise DataError(
            f"there are no weights in {path}" if path.is_dir() else f"there is no file {path}",
            "Name a .safetensors file, or a folder with one, such as `archipelago export` writes.",
            code="weights.missing",
        )
    return files


def read_config(folder: Path) -> Mapping[str, Any]:
    """Read `config.json` in a folder. It is empty if there is none. Raise DataError (`weights.damaged`) or OSError."""
    return _json_at(folder / CONFIG_FILE)


def _json_at(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(_CONFIG_BYTES_MAX))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise DataError(
            f"{path} does not hold a JSON object", "Restore it from a copy, or delete it.", code="weights.damaged"
        )
    return found


def damaged(file: Path, error: Exception) -> DataError:
    """Return the error that a file of weights is damaged."""
    return DataError(
        f"{file} cannot be read as safetensors ({error!s:.200})",
        "It may be incomplete. Restore it from a copy.",
        code="weights.damaged",
    )


def _shape(shape: Sequence[int]) -> str:
    return " × ".join(f"{size:,}" for size in shape) or "one number"


def _some(names: Sequence[str]) -> str:
    return few_of([name[:120] for name in names], 3)


# -- the tokenizer of weights ------------------------------------------------------------------------------------------


def require_model(files: WeightFiles, size: str) -> None:
    """Raise ConfigError (`llama.different`) if a `config.json` beside weights describes another model than ours.

    Args:
        size: The name of our size.
    """
    from archipelago.islands.models.llama import DENSE, size_of

    kind = files.config.get("model_type", OWN_KIND)
    theirs = size_of(files.config) if kind == "llama" and size in DENSE else None
    if kind not in ("llama", OWN_KIND) or (theirs and theirs != DENSE[size]):
        found = f"a Llama with {theirs}, and the model {size!r} has {DENSE[size]}" if theirs else f"a {kind!r:.40}"
        raise ConfigError(
            f"the config.json beside the weights in {files.path} describes {found}",
            "Give weights of that model, or train theirs by a script or a task of your own.",
            code="llama.different",
        )


def require_tokenizer(files: WeightFiles, corpus: OpenCorpus) -> bool:
    """Check that a corpus was made with the tokenizer that weights were trained with.

    The weights of `archipelago export` say which it was; for others, it is the `tokenizer.json` beside them. Return
    False if the weights do not say it. Raises DataError if it is another one (`weights.tokenizer`), or if its file
    cannot be used.
    """
    from archipelago.islands.data.tokenizer import FILE, byte_tokenizer, from_file

    beside = path if (path := files.folder / FILE).is_file() else None
    ours, plain = corpus.open_tokenizer().meaning, byte_tokenizer().meaning
    theirs = files.tokenizer or (from_file(beside).meaning if beside else "")
    if theirs in ("", ours):
        return bool(theirs)
    own, other = (
        "the bytes of text" if each == plain else f"tokens of the tokenizer {each}" for each in (ours, theirs)
    )
    how = "without --tokenizer" if theirs == plain else f"with --tokenizer {beside or 'THEIR_TOKENIZER_JSON'}"
    raise DataError(
        f"the weights in {files.path} were trained on {other}, and the corpus {corpus.name!r} holds {own}",
        f"Prepare the text for these weights (`archipelago prepare TEXT`, {how}), and name that corpus with "
        "--data.corpus.",
        code="weights.tokenizer",
    )
