"""Models, augmentation, training with and without privacy, and prediction, for teachers, students and baselines."""
