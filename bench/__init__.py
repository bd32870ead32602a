"""Measurements side by side with other software; each program prints one JSON object last."""
