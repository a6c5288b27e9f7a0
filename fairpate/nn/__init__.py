"""Models, augmentation, one fit loop and batched prediction, shared by teachers, students and baselines."""
