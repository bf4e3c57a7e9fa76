"""Control of decoding on the host: tags, templates, grammars and texts that end answers."""
