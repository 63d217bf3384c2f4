"""What 8-bit communication is worth: the paper's model and ours, and the errors of the data types.

paper    the paper's predictions (sections 2.3, 4 and 5), and what is left of them once corrected
errors   the approximation errors of the data types (table 2)
models   layers of well-known networks, or of a Keras model
model    a general model of data and model parallelism on given hardware
measure  calibrates that model on the user's own ranks; the only one that needs TensorFlow and Horovod
"""
