"""Programs that keep the project in order; no package is installed from here."""
