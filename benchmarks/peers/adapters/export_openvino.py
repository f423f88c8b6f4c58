"""Export of a checkpoint to OpenVINO, run in the environment that has optimum-intel: `export_openvino.py FOLDER TASK TEXTS`.

Writes `openvino/openvino_model.xml`, and `openvino_model_qint8.xml` with weights and activations in int8, whose ranges are
those of the texts in the JSON file TEXTS.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import nncf
import numpy as np
import openvino as ov
from optimum.intel import OVModelForFeatureExtraction, OVModelForMaskedLM, OVModelForSequenceClassification
from tokenizers import Tokenizer


def main() -> None:
    folder, task, texts = Path(sys.argv[1]), sys.argv[2], json.loads(Path(sys.argv[3]).read_text())
    kinds = {"rerank": OVModelForSequenceClassification, "sparse": OVModelForMaskedLM}
    kind = kinds.get(task, OVModelForFeatureExtraction)
    out = folder / "openvino"
    shutil.rmtree(out, ignore_errors=True)
    kind.from_pretrained(folder, export=True, compile=False, load_in_8bit=False).save_pretrained(out)
    model = ov.Core().read_model(out / "openvino_model.xml")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(512)
    names = [each.get_any_name() for each in model.inputs]
    if task == "rerank":
        texts = list(zip(texts[1:], texts, strict=False))

    def inputs(text: Any) -> dict[str, Any]:
        encoded = tokenizer.encode(*text) if isinstance(text, tuple) else tokenizer.encode(text)
        values = {"input_ids": encoded.ids, "attention_mask": encoded.attention_mask, "token_type_ids": encoded.type_ids}
        values["position_ids"] = list(range(len(encoded.ids)))
        return {name: np.array([values[name]], np.int64) for name in names}

    quantised = nncf.quantize(model, nncf.Dataset(texts, inputs), model_type=nncf.ModelType.TRANSFORMER, subset_size=len(texts))
    ov.save_model(quantised, out / "openvino_model_qint8.xml", compress_to_fp16=False)


if __name__ == "__main__":
    main()
