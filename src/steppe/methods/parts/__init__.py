"""What methods are assembled from: optimizer steps, perturbations, buffers."""
