"""Export of a checkpoint to ONNX, run in the environment that has optimum-onnx: `export_onnx.py FOLDER TASK`.

Writes `onnx/model.onnx` (float32), `model_O3.onnx` (ONNX Runtime's fused operators) and `model_qint8.onnx` (the latter's
products in int8, quantised dynamically) into the folder, and for the task "token-vectors"
`model_tokens.onnx`. The last one ends with the projection.
"""

import shutil
import sys
from pathlib import Path

import onnx
from onnxruntime.quantization import QuantType, quantize_dynamic
from optimum.onnxruntime import ORTModelForFeatureExtraction, ORTModelForSequenceClassification, ORTOptimizer
from optimum.onnxruntime.configuration import AutoOptimizationConfig
from safetensors.numpy import load_file


def main() -> None:
    folder, task = Path(sys.argv[1]), sys.argv[2]
    kind = ORTModelForSequenceClassification if task == "rerank" else ORTModelForFeatureExtraction
    out = folder / "onnx"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    work = folder / "onnx-work"
    kind.from_pretrained(folder, export=True).save_pretrained(work)
    optimizer = ORTOptimizer.from_pretrained(work)
    optimizer.optimize(AutoOptimizationConfig.O3(), save_dir=work, file_suffix="O3")
    for name in ("model.onnx", "model_O3.onnx"):
        shutil.copy(work / name, out / name)
    fused, quantised = out / "model_O3.onnx", out / "model_qint8.onnx"
    options = {"DefaultTensorType": onnx.TensorProto.FLOAT}  # shapes are not inferred through fused operators
    quantize_dynamic(fused, quantised, per_channel=True, weight_type=QuantType.QInt8, extra_options=options)
    shutil.rmtree(work)
    if task == "token-vectors":
        _project(out / "model.onnx", folder / "model.safetensors", out / "model_tokens.onnx")


def _project(source: Path, weights: Path, target: Path) -> None:
    """Put ColBERT's projection behind the hidden states of a graph, and take its input of types away: they are all 0."""
    model = onnx.load(source)
    types = next(each for each in model.graph.input if each.name == "token_type_ids")
    model.graph.input.remove(types)
    model.graph.node.insert(0, onnx.helper.make_node("Sub", ["input_ids", "input_ids"], [types.name]))
    weight = load_file(weights)["linear.weight"]
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight.T.copy(), "projection"))
    hidden = model.graph.output[0].name
    model.graph.node.append(onnx.helper.make_node("MatMul", [hidden, "projection"], ["token_vectors"]))
    shape = ["batch", "tokens", weight.shape[0]]
    del model.graph.output[:]
    model.graph.output.append(onnx.helper.make_tensor_value_info("token_vectors", onnx.TensorProto.FLOAT, shape))
    onnx.save(model, target)


if __name__ == "__main__":
    main()
