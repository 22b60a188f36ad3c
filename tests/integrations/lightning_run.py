"""A real Lightning run that writes down which hooks were called and which sections FTCallback opened and closed for them.

    python lightning_run.py PACKAGE fit|validate|raises        (needs torch and PACKAGE: lightning.pytorch or pytorch_lightning)

Its output is what `recorded/lightning_*.txt` hold: a line a hook (`hook NAME global_step [sanity]`) or a section (`open NAME [iteration]`, `close NAME [exception]`).
"""

import importlib
import sys
import tempfile

import torch

pl = importlib.import_module(sys.argv[1])

from ft_launcher.integrations import lightning as ours  # noqa: E402
from tests.integrations.notebook import Notebook  # noqa: E402

HOOKS = [
    "setup", "on_train_batch_start", "on_train_batch_end", "on_validation_batch_start", "on_validation_batch_end", "on_test_batch_start", "on_test_batch_end", "on_exception", "teardown",
]  # fmt: skip
notebook = Notebook()
ours.attach = lambda: notebook  # type: ignore[assignment,return-value]


def recorded(name):
    """A hook of the callback that is noted before it runs."""

    def hook(self, trainer, module, *rest, **named):
        notebook.hook(name, trainer.global_step, trainer.sanity_checking)
        return getattr(ours.FTCallback, name)(self, trainer, module, *rest, **named)

    return hook


Recording = type("Recording", (ours.FTCallback,), {name: recorded(name) for name in HOOKS})


class Toy(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        if sys.argv[2] == "raises" and self.global_step == 2:
            raise RuntimeError("a bad batch")
        return self.layer(batch).sum()

    def validation_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main():
    data = torch.utils.data.DataLoader(torch.ones(6, 4), batch_size=2)
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = importlib.import_module(f"{sys.argv[1]}.callbacks").ModelCheckpoint(dirpath=folder, save_top_k=-1)
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "devices": 1}
        trainer = pl.Trainer(callbacks=[Recording(), checkpoints], max_epochs=2, num_sanity_val_steps=1, limit_val_batches=2, **quiet)
        try:
            trainer.validate(Toy(), data, verbose=False) if sys.argv[2] == "validate" else trainer.fit(Toy(), data, data)
        except RuntimeError as error:
            assert str(error) == "a bad batch"
        assert "save_checkpoint" not in vars(trainer), "what was wrapped is as it was"
    print("\n".join(notebook.lines))


if __name__ == "__main__":
    main()
