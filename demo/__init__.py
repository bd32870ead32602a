"""The embedded default: a tiny model, scripted demonstrations, a local teacher, its presets."""
