"""PyTorch Lightning under ft-launch: FTCallback says where training is, the newest checkpoint is where each start begins.

ft-launch --nproc-per-node 2 examples/lightning/train.py --epochs 3 --save DIR
"""

import argparse
import importlib
import importlib.util
import os
from pathlib import Path

import torch

from ft_launcher.integrations.lightning import FTCallback

PACKAGE = "lightning.pytorch" if importlib.util.find_spec("lightning") else "pytorch_lightning"
pl = importlib.import_module(PACKAGE)
callbacks = importlib.import_module(f"{PACKAGE}.callbacks")


class Sines(pl.LightningModule):
    """A small network that learns sines."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))

    def _loss(self, batch: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.model(batch), torch.sin(batch.sum(1, keepdim=True)))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """One step."""
        loss = self._loss(batch)
        if self.global_rank == 0:
            print(f"epoch {self.current_epoch} step {self.global_step} loss {float(loss.detach()):.6f}", flush=True)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """One batch of validation."""
        return self._loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main() -> None:
    """Arguments, data, trainer; from the last checkpoint where there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--save", type=Path, default=Path("checkpoints"), metavar="DIR")
    args = parser.parse_args()
    torch.set_num_threads(1)
    pl.seed_everything(1, verbose=False)
    data = torch.utils.data.DataLoader(torch.randn(256, 8), batch_size=16)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = pl.Trainer(
        max_epochs=args.epochs,
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        strategy="ddp" if ranks > 1 else "auto",
        callbacks=[FTCallback(), callbacks.ModelCheckpoint(dirpath=args.save, save_last=True, every_n_epochs=1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = args.save / "last.ckpt"
    trainer.fit(Sines(), data, data, ckpt_path=str(last) if last.exists() else None)


if __name__ == "__main__":
    main()
