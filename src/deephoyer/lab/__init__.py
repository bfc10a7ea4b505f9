"""The lab: recipes, data, networks, training, records. In the extra `lab`; the library never imports it."""
