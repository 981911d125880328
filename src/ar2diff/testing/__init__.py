"""The testing kit, shipped so that users can test their own code: tiny models, tokenizers, a loopback hub."""
