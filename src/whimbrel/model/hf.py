"""Fallback for other architectures: transformers' model on ragged rows, with Whimbrel's attention and linear layers.

transformers lets a program register an attention function, which keeps the texts of a batch apart. The rest of the model sees
one row of all tokens, with the positions of each text. The residual stream is in the plan's dtype, as in transformers.

Models that cannot raise no error, so each is checked before it is used. Every layer must attend through transformers' attention
interface. Three random texts in one batch must give what each gives alone by transformers' own attention. The check runs in
float32, with a window short enough to affect these texts.

Shapes: R rows, T tokens, D model width, N query heads, K key heads, H head width.
"""

import gc
import inspect
import re
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from whimbrel.checkpoint.config.reader import read_config, refuse_undeclared
from whimbrel.checkpoint.json_file import JsonFile
from whimbrel.checkpoint.summary import FAMILY_HEADS, TASK_HEADS
from whimbrel.errors import CheckpointError
from whimbrel.model.fallback.trials import note_unstable, unrecorded
from whimbrel.model.ops.attention import AttentionLayout, LayerHook, ScoreOptions, attend
from whimbrel.model.ops.linear import Linear, round_up_rows
from whimbrel.types.arrays import Int32Array
from whimbrel.types.batch import Batch, equal_length_groups, pack
from whimbrel.types.card import Card
from whimbrel.types.seq import Seq

hf: Final[Any] = transformers
"""transformers without types: most of it is untyped."""

ATTENTION_NAME: Final = "whimbrel"
"""Name of Whimbrel's attention in transformers."""
_INERT_ARGUMENTS: Final = frozenset({"dropout", "output_attentions", "position_ids", "use_cache"})
_TOLERANCE: Final = 1e-4
"""Largest relative difference from the largest hidden state."""
_LENGTHS: Final = (5, 17, 40)
_WINDOW: Final = 8
"""Attention window of a model while it is checked, if its own is longer."""
_ROWS: Final = 1024
"""Positions below which the check uses more rows than positions."""


@dataclass(frozen=True, slots=True, eq=False)
class HFForward:
    """State of one forward pass, for the attention."""

    layout: AttentionLayout
    between_layers: LayerHook = None
    attended: list[nn.Module] = field(default_factory=list[nn.Module])
    """Layers that have run."""


class HFModel:
    """Loaded model, called like `Transformer`."""

    def __init__(self, model: Any, *, has_types: bool) -> None:
        self._model = model
        self._has_types = has_types
        for name, module in model.named_modules():
            if type(module) in _LINEARS:
                _replace(module, *_LINEARS[type(module)](module))
            elif not isinstance(module, nn.Embedding):
                _note_products(name, module)

    def __call__(
        self, ids_R: Tensor, positions_R: Tensor, type_ids_R: Tensor, layout: AttentionLayout, between_layers: LayerHook = None
    ) -> Tensor:
        return self.run(ids_R, positions_R, type_ids_R, HFForward(layout, between_layers))

    def run(self, ids_R: Tensor, positions_R: Tensor, type_ids_R: Tensor, run: HFForward) -> Tensor:
        """Return the hidden states, with a state that the caller can inspect afterwards."""
        types = {"token_type_ids": type_ids_R[None].long()} if self._has_types else {}
        output = self._model(
            input_ids=ids_R[None].long(), position_ids=positions_R[None].long(), use_cache=False, whimbrel=run, **types
        )
        return output.last_hidden_state[0].float()


def _attend(
    module: nn.Module,
    q_1NRH: Tensor,
    k_1KRH: Tensor,
    v_1KRH: Tensor,
    attention_mask: Tensor | None,
    *,
    whimbrel: HFForward | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **more: object,
) -> tuple[Tensor, None]:
    """Attention function for transformers' layers. Raises TypeError for arguments that `attend` does not support."""
    unknown = [name for name, value in more.items() if value is not None and name not in _INERT_ARGUMENTS]
    causal: object = getattr(module, "is_causal", None) if is_causal is None else is_causal
    if whimbrel is None or unknown or not isinstance(causal, bool):
        raise TypeError(f"its attention has a form of its own{': ' * bool(unknown)}{', '.join(unknown)}")
    if attention_mask is not None or q_1NRH.shape[-1] != v_1KRH.shape[-1] or (sliding_window or 1) < 1:
        raise TypeError("its attention has a mask, a window or a width of values of its own")
    if scaling is not None and not scaling > 0:
        raise TypeError(f"its attention multiplies scores by {scaling}")
    if whimbrel.attended and whimbrel.between_layers is not None:
        whimbrel.between_layers()
    whimbrel.attended.append(module)
    scale, window = scaling or q_1NRH.shape[-1] ** -0.5, None if sliding_window is None else sliding_window - 1
    scores = ScoreOptions(scale, causal=causal, window=window, softcap=softcap)
    q_RNH, k_RKH, v_RKH = (x[0].transpose(0, 1) for x in (q_1NRH, k_1KRH, v_1KRH))
    return attend(q_RNH, k_RKH, v_RKH, whimbrel.layout, scores).view(1, *q_RNH.shape), None


hf.AttentionInterface.register(ATTENTION_NAME, _attend)

_LINEARS: Final[Mapping[type, Callable[[Any], tuple[Tensor, Tensor | None]]]] = {
    nn.Linear: lambda module: (module.weight.detach(), None if module.bias is None else module.bias.detach()),
    hf.pytorch_utils.Conv1D: lambda module: (module.weight.detach().T.contiguous(), module.bias.detach()),
}
"""Functions that return weight and bias, by class of linear layer."""


def _note_products(name: str, module: nn.Module) -> None:
    """Record weights that transformers multiplies itself, e.g. those of experts."""
    for weight, value in module.named_parameters(recurse=False):
        if value.ndim >= 2:
            layers = re.sub(r"\.\d+\.", ".*.", f"{name}.{weight}")
            note_unstable(f"transformers itself multiplies by {layers}, in numbers of rows that depend on the batch")


def _replace(module: nn.Module, weight_OI: Tensor, bias_O: Tensor | None) -> None:
    linear, width = Linear(weight_OI, bias_O), weight_OI.shape[0]

    def forward(x: Tensor) -> Tensor:
        return linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], width)

    module.forward = forward
    module.weight = nn.Parameter(torch.empty(0, dtype=weight_OI.dtype, device=weight_OI.device), requires_grad=False)


def load_hf(folder: Path, card: Card, *, device: torch.device, dtype: torch.dtype) -> HFModel:
    """Load the transformer of the checkpoint in `folder`. Raises CheckpointError, also if it does not run on ragged rows."""
    source = _Source(folder, card, device)
    if dtype == torch.float32 and not _has_long_window(source.config):
        return _check(source)
    with unrecorded():  # the model that is returned has other products
        _check(source)
    gc.collect()
    return HFModel(source.load(source.config, dtype, ATTENTION_NAME), has_types=source.has_types)


class _Source:
    def __init__(self, folder: Path, card: Card, device: torch.device) -> None:
        self.encoder = card.encoder
        self.device = device
        self.has_types = card.encoder.type_vocab_size > 0
        self.file = f"{card.path}/model.safetensors" if card.path else "model.safetensors"
        self._root = folder / card.path
        if (self._root / "adapter_config.json").exists():
            raise CheckpointError("adapters are not supported with this architecture.", file="adapter_config.json")
        file = read_config(self._root)
        self._architecture: str = file.get("architectures", list)[0]
        self.config = self._read_config(file)

    def _read_config(self, file: JsonFile) -> Any:
        try:
            with _quiet():
                config: Any = hf.AutoConfig.from_pretrained(self._root, local_files_only=True, trust_remote_code=False)
                kind = cast(Any, type(config))
                declared = {*inspect.signature(kind).parameters, *config.attribute_map, *kind().to_dict()}
        except Exception as error:  # transformers raises many kinds
            raise file.error(f"transformers refuses this config: {_first_line(error)}.", "model_type") from None
        expected = getattr(hf, self._architecture).config_class
        if kind is not expected:
            raise file.error(f"{self._architecture} goes with model_type {expected.model_type!r}.", "model_type")
        refuse_undeclared(file, declared)
        return config

    def load(self, config: Any, dtype: torch.dtype, attention: str) -> Any:
        try:
            kind = hf.MODEL_MAPPING[type(config)]
            has_pooler = "add_pooling_layer" in inspect.signature(kind).parameters
            with _quiet():
                model, report = hf.AutoModel.from_pretrained(
                    self._root,
                    config=deepcopy(config),
                    dtype=dtype,
                    attn_implementation=attention,
                    local_files_only=True,
                    trust_remote_code=False,
                    use_safetensors=True,
                    ignore_mismatched_sizes=True,
                    output_loading_info=True,
                    **({"add_pooling_layer": False} if has_pooler else {}),
                )
        except Exception as error:
            raise self.error(f"transformers cannot load it: {_first_line(error)}.", error) from None
        self._refuse_other_weights(model, report)
        return model.to(self.device).eval().requires_grad_(False)

    def _refuse_other_weights(self, model: Any, report: Any) -> None:
        prefix = f"{model.base_model_prefix}."
        is_larger = type(model).__name__ != self._architecture
        extra = [
            name
            for name in report["unexpected_keys"]
            if not name.removeprefix(prefix).startswith("pooler.")
            and (name.startswith(prefix) if is_larger else name.partition(".")[0] not in (*TASK_HEADS, *FAMILY_HEADS))
        ]
        for names, message in (
            ([name for name in report["missing_keys"] if not name.startswith("pooler.")], "this tensor is missing."),
            ([name for name, *_ in report["mismatched_keys"]], "has another shape than the config says."),
            (extra, "this tensor is not known to transformers, and may change the vectors."),
        ):
            if names:
                raise CheckpointError(message, file=self.file, key=min(names))

    def put(self, array: Int32Array) -> Tensor:
        return torch.from_numpy(array).to(self.device)  # pyright: ignore[reportUnknownMemberType]

    def error(self, message: str, cause: Exception | None = None) -> Exception:
        if isinstance(cause, CheckpointError | MemoryError | torch.OutOfMemoryError):
            return cause
        return CheckpointError(f"{self._architecture}: {message}", file="config.json", key="architectures")


def _check(source: _Source) -> HFModel:
    """Return the model in float32. Raises CheckpointError if it does not run on ragged rows."""
    config = deepcopy(source.config)
    if _has_long_window(config):
        config.sliding_window = _WINDOW
    model = source.load(config, torch.float32, "eager")
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise CheckpointError("holds NaN or infinity.", file=source.file, key=name)
    if not model._supports_attention_backend:
        raise source.error("its attention does not pass through transformers' attention interface.")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise source.error("it does not take positions, so texts cannot lie one after another.")
    try:
        with _quiet():
            expected_TD, hidden_TD, num_attended, packed = _compare(model, source)
    except Exception as error:
        raise source.error(f"cannot be run on ragged rows: {_first_line(error)}.", error) from None
    num_layers = config.get_text_config().num_hidden_layers
    if num_attended != num_layers:
        raise source.error(f"of its {num_layers} layers {num_attended} attend through transformers' attention interface.")
    if expected_TD.shape[1] != source.encoder.hidden_size:
        raise source.error(f"its hidden states have width {expected_TD.shape[1]}, not hidden_size.")
    difference = float((hidden_TD - expected_TD).abs().max() / expected_TD.abs().max())
    if not difference <= _TOLERANCE:
        raise source.error(
            "cannot be run on ragged rows: the hidden states of texts that lie one after another differ from those of each"
            f" text alone by {difference:.1e} of the largest."
        )
    return packed


def _compare(model: Any, source: _Source) -> tuple[Tensor, Tensor, int, HFModel]:
    """Return the hidden states of each text alone and in a batch, the number of attending layers, and the model."""
    batch = _make_texts(source)
    alone = [
        model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).last_hidden_state[0]
        for ids in (source.put(row)[None].long() for row in np.split(batch.ids_T, batch.cu_seqlens[1:-1]))
    ]
    model.set_attn_implementation(ATTENTION_NAME)
    packed = HFModel(model, has_types=source.has_types)
    positions = source.encoder.max_positions
    num_rows = round_up_rows(max(batch.num_tokens, positions + 1 if positions < _ROWS else 0))
    ids_R, positions_R = (source.put(np.pad(x, (0, num_rows - x.size))) for x in (batch.ids_T, batch.positions_T))
    offsets, longest = source.put(batch.cu_seqlens), int(np.diff(batch.cu_seqlens).max())
    run = HFForward(AttentionLayout(offsets, equal_length_groups(batch.cu_seqlens), batch.num_tokens, longest))
    hidden_RD = packed.run(ids_R, positions_R, torch.zeros_like(ids_R), run)
    return torch.cat(alone), hidden_RD[: batch.num_tokens], len(run.attended), packed


def _make_texts(source: _Source) -> Batch:
    """Return three texts of random ids. One holds all ids with a role in the config, which may be more than table rows."""
    encoder, rng = source.encoder, np.random.default_rng(0)
    texts = [rng.integers(0, encoder.vocab_size, min(n, encoder.max_positions)).astype(np.int32) for n in _LENGTHS]
    ids = {
        value
        for key, value in source.config.to_dict().items()
        if key.endswith("_token_id") and isinstance(value, int) and 0 <= value < encoder.vocab_size
    }
    special = np.array(sorted(ids), np.int32)[: max(0, texts[1].size - 2)]
    texts[1][1 : 1 + special.size] = special
    return pack([Seq(row, i) for i, row in enumerate(texts)], position_offset=encoder.position_offset, pad_id=encoder.pad_id)


def _has_long_window(config: Any) -> bool:
    window = getattr(config, "sliding_window", None)
    return isinstance(window, int) and window > _WINDOW


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")[:200]


@contextmanager
def _quiet() -> Generator[None]:
    """Silence transformers' loading report and its progress bar."""
    logging = hf.logging
    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()
