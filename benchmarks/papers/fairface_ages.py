"""Train a ResNet-18 on the ages of FairFace, public pictures, as initial weights for other faces.

    FAIRPATE_DATA=... python benchmarks/papers/fairface_ages.py runs/fairface_ages.pth [--device cuda] [--epochs 30]

20,000 pictures of 64 pixels in nine bounds of years, mirrored and shifted at random; prints the share of 5,000 others
that it classifies correctly. `backbone.weights` reads the file (configs/fermi_faces_pretrained.yaml).
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import os
import zipfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from fairpate.encoders import prepare_torchvision
from fairpate.nn.models import ImageNetScale

BATCH_SIZE, SHIFT = 256, 6


def read(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """The pictures (N, 3, 64, 64) of ``part``, bytes, and the numbers of their ages in ascending order, (N,)."""
    table = folder / f"fairface_label_{part}.csv"
    text = table.read_text() if table.exists() else gzip.decompress(table.with_suffix(".csv.gz").read_bytes()).decode()
    age_of = {row["file"].removeprefix("fairface/"): row["age"] for row in csv.DictReader(io.StringIO(text))}
    with zipfile.ZipFile(folder / "fairface-64px.zip") as archive:
        names = sorted(name for name in archive.namelist() if name.startswith(part) and age_of[name] != "age")
        pictures = [np.asarray(Image.open(io.BytesIO(archive.read(name))).convert("RGB")) for name in names]
    ages = sorted({age_of[name] for name in names}, key=lambda age: int(age.replace("more than ", "").split("-")[0]))
    x = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2)
    return x, torch.tensor([ages.index(age_of[name]) for name in names])


def changed(x: Tensor, generator: torch.Generator) -> Tensor:
    """The pictures of a batch, half of them mirrored, all shifted alike by up to six pixels."""
    mirrored = torch.rand(len(x), 1, 1, 1, generator=generator, device=x.device) < 0.5
    x = torch.where(mirrored, x.flip(3), x)
    down, right = torch.randint(0, 2 * SHIFT + 1, (2,), generator=generator, device=x.device).tolist()
    padded = functional.pad(x, (SHIFT,) * 4, mode="reflect")
    return padded[:, :, down : down + x.shape[2], right : right + x.shape[3]]


def train(x: Tensor, y: Tensor, *, epochs: int) -> nn.Module:
    """A ResNet-18 on the device of ``x``: AdamW, one cycle of rates, bfloat16 products."""
    prepare_torchvision()
    from torchvision.models import resnet18

    torch.manual_seed(0)
    network = nn.Sequential(ImageNetScale(), resnet18(weights=None, num_classes=int(y.max()) + 1)).to(x.device)
    steps = epochs * (len(x) // BATCH_SIZE)
    optimizer = torch.optim.AdamW(network.parameters(), weight_decay=0.05)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps)
    generator = torch.Generator(x.device).manual_seed(0)
    for _ in range(epochs):
        order = torch.randperm(len(x), generator=generator, device=x.device)
        for rows in torch.split(order, BATCH_SIZE)[: len(x) // BATCH_SIZE]:
            with torch.autocast(x.device.type, dtype=torch.bfloat16):
                logits = network(changed(x[rows].float() / 255, generator))
            loss = functional.cross_entropy(logits.float(), y[rows], label_smoothing=0.1)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            rates.step()
    return network.eval()


def main() -> None:
    """Train, measure, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--epochs", type=int, default=30)
    options = parser.parse_args()
    folder = Path(os.environ["FAIRPATE_DATA"]) / "fairface"
    x, y = (part.to(options.device) for part in read(folder, "train"))
    network = train(x, y, epochs=options.epochs)
    test_x, test_y = (part.to(options.device) for part in read(folder, "val"))
    with torch.no_grad():
        answers = torch.cat([network(part.float() / 255).argmax(dim=1) for part in torch.split(test_x, BATCH_SIZE)])
    print(f"{float((answers == test_y).float().mean()):.3f} of {len(test_y)} pictures are classified correctly")
    options.file.parent.mkdir(parents=True, exist_ok=True)
    weights: nn.Module = network[1]  # type: ignore[index]
    torch.save({name: value.cpu() for name, value in weights.state_dict().items()}, options.file)


if __name__ == "__main__":
    main()
