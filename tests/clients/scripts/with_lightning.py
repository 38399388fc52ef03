"""Lightning's DDPStrategy creates the process group by the given backend name."""

import sys

import pytorch_lightning as pl
import torch
from data import Samples, network, tell
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return torch.nn.functional.mse_loss(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def on_train_end(self) -> None:
        tell(self.network)


trainer = pl.Trainer(
    accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend=sys.argv[1]), max_epochs=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, default_root_dir=sys.argv[2],
)  # fmt: skip
trainer.fit(Module(), torch.utils.data.DataLoader(Samples(), batch_size=8))
