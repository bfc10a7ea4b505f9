"""AlexNet as it was in 2012 (Krizhevsky et al.): convolutions 2, 4 and 5 in two groups, 227 × 227 inputs.

Not torchvision's, which is the later one-tower net with 61.1M parameters in other places. Local
response normalisation is off unless asked for: it mixes neighbouring channels, so that a channel
can't be taken out without changing the others.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from deephoyer.errors import UserError, positive_whole, share


class AlexNet(nn.Module):
    """the original with grouped convolutions 2, 4 and 5: 60.95M weights"""

    def __init__(self, classes: int = 1000, dropout: float = 0.5, response_norm: bool = False, width: float = 1.0):
        """`width` multiplies the channels and neurons of every layer, for trying things out."""
        super().__init__()
        one, two, three, neurons = (2 * round(n * width / 2) for n in (96, 256, 384, 4096))
        if min(one, neurons) < 2:
            raise UserError(f"width is {width!r}; that leaves nothing of some layers.")
        self.conv1 = nn.Conv2d(3, one, 11, stride=4)
        self.conv2 = nn.Conv2d(one, two, 5, padding=2, groups=2)
        self.conv3 = nn.Conv2d(two, three, 3, padding=1)
        self.conv4 = nn.Conv2d(three, three, 3, padding=1, groups=2)
        self.conv5 = nn.Conv2d(three, two, 3, padding=1, groups=2)
        self.fc1 = nn.Linear(two * 6 * 6, neurons)
        self.fc2 = nn.Linear(neurons, neurons)
        self.fc3 = nn.Linear(neurons, positive_whole(classes, "classes"))
        self.dropout = nn.Dropout(share(dropout, "dropout"))
        self.norm = nn.LocalResponseNorm(5) if response_norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.norm(F.relu(self.conv1(x))), 3, 2)
        x = F.max_pool2d(self.norm(F.relu(self.conv2(x))), 3, 2)
        x = F.relu(self.conv4(F.relu(self.conv3(x))))
        x = F.max_pool2d(F.relu(self.conv5(x)), 3, 2).flatten(1)
        x = F.relu(self.fc1(self.dropout(x)))
        x = F.relu(self.fc2(self.dropout(x)))
        return self.fc3(x)
