"""Building blocks of methods: the SGD step, perturbations, replay buffers."""
