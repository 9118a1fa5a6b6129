"""Rotary scalings of config.json (`rope_scaling`), for tests of both engines.

The test models' wavelengths lie on both sides of each threshold, so every branch of the scalings is computed.
"""

ROPES = {
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
}
