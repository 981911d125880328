"""One file per Hugging Face model_type: its config and tensor names mapped onto the decoder."""
