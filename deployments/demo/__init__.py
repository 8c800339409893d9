"""Everything `lorafleet demo` brings along: a small base model, three trained adapters, an embedded S3."""
