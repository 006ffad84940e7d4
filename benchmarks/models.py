"""Small models with data of their own shape, for what is measured end to end."""

from __future__ import annotations

import keras
import numpy as np

Batch = tuple[np.ndarray, np.ndarray]


def transformer(quick: bool = False) -> tuple[keras.Model, Batch]:
    """A decoder of some four million parameters, and a batch of tokens."""
    depth, width, length, vocabulary = (1, 64, 16, 256) if quick else (4, 256, 64, 2048)
    tokens = keras.Input((length,), dtype="int32")
    x = keras.layers.Embedding(vocabulary, width)(tokens)
    for _ in range(depth):
        normal = keras.layers.LayerNormalization()(x)
        attended = keras.layers.MultiHeadAttention(4, width // 4)(
            normal, normal, use_causal_mask=True
        )
        x = keras.layers.Add()([x, attended])
        normal = keras.layers.LayerNormalization()(x)
        wide = keras.layers.Dense(4 * width, activation="gelu")(normal)
        x = keras.layers.Add()([x, keras.layers.Dense(width)(wide)])
    logits = keras.layers.Dense(vocabulary)(keras.layers.LayerNormalization()(x))
    random = np.random.default_rng(seed=0)
    data = random.integers(0, vocabulary, (8, length + 1)).astype("int32")
    return keras.Model(tokens, logits), (data[:, :-1], data[:, 1:])


def resnet(quick: bool = False) -> tuple[keras.Model, Batch]:
    """A residual network of three stages, and a batch of images."""
    widths = (8,) if quick else (32, 64, 128)
    images = keras.Input((32, 32, 3))
    x = keras.layers.Conv2D(widths[0], 3, padding="same", use_bias=False)(images)
    for stage, width in enumerate(widths):
        for block in range(2):
            stride = 2 if stage and not block else 1
            y = keras.layers.BatchNormalization()(x)
            y = keras.layers.Activation("relu")(y)
            y = keras.layers.Conv2D(width, 3, stride, padding="same", use_bias=False)(y)
            y = keras.layers.BatchNormalization()(y)
            y = keras.layers.Activation("relu")(y)
            y = keras.layers.Conv2D(width, 3, padding="same", use_bias=False)(y)
            if stride > 1:
                x = keras.layers.Conv2D(width, 1, stride, use_bias=False)(x)
            x = keras.layers.Add()([x, y])
    x = keras.layers.GlobalAveragePooling2D()(x)
    random = np.random.default_rng(seed=0)
    batch = random.standard_normal((8, 32, 32, 3), dtype="float32")
    labels = random.integers(0, 10, 8).astype("int32")
    return keras.Model(images, keras.layers.Dense(10)(x)), (batch, labels)


MODELS = {"transformer": transformer, "resnet": resnet}
