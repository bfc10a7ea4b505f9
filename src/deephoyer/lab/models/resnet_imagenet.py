"""ResNet-50 for 224 × 224 images: torchvision's, which the lab brings."""

from __future__ import annotations

from torch import nn

from deephoyer.errors import UserError, one_of, positive_whole


def resnet50(classes: int = 1000, stride: str = "conv2") -> nn.Module:
    """torchvision's ResNet-50: 25.5M weights

    `stride` says which convolution of a stage's first block halves the image: torchvision's 3 × 3
    `conv2`, or `conv1` as in the first publication ("v1").
    """
    one_of("stride", stride, ("conv1", "conv2"))
    positive_whole(classes, "classes")
    try:
        from torchvision.models import resnet50 as build
    except ImportError as why:
        raise UserError(
            f"model 'resnet-50' comes from torchvision, which can't be imported ({why}). "
            "`pip install 'deephoyer[lab]'` installs it."
        ) from None
    model = build(weights=None, num_classes=classes)
    if stride == "conv1":
        for stage in (model.layer2, model.layer3, model.layer4):
            first = stage[0]
            first.conv1.stride, first.conv2.stride = (2, 2), (1, 1)
    return model
