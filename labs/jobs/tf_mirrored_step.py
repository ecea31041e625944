"""The same step in TensorFlow: MirroredStrategy is data parallelism inside one process.

python labs/jobs/tf_mirrored_step.py      # every GPU, or four devices made of the CPU
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # else its start is twenty lines long

import tensorflow as tf  # noqa: E402
import tiny_step  # noqa: E402

if not tf.config.list_physical_devices("GPU"):
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)
kind = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
strategy = tf.distribute.MirroredStrategy([d.name for d in tf.config.list_logical_devices(kind)])
size = strategy.num_replicas_in_sync
x, y = tiny_step.data()
with strategy.scope():  # every replica has a copy; a broadcast of what is here
    w1, w2 = (tf.Variable(each) for each in tiny_step.weights())


def mine(each):
    """The part of each replica, as a value that has one on every device."""
    return strategy.experimental_distribute_values_from_function(
        lambda replica: tf.constant(each[replica.replica_id_in_sync_group :: size])
    )


def loss_and_gradients(x, y):
    with tf.GradientTape() as tape:
        logits = tf.tanh(x @ w1) @ w2
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
        loss = tf.reduce_mean(losses)
    return loss, tape.gradient(loss, [w1, w2])


@tf.function
def step(x, y):
    loss, gradients = strategy.run(loss_and_gradients, (x, y))
    for w, gradient in zip((w1, w2), gradients):
        # MEAN, because each loss is a mean already; Keras' optimizers SUM, and want losses
        # that were divided by the examples of all replicas.
        w.assign_sub(tiny_step.LR * strategy.reduce("MEAN", gradient, axis=None))
    return strategy.reduce("MEAN", loss, axis=None)


examples = mine(x), mine(y)
before, after = float(step(*examples)), float(step(*examples))
tiny_step.report(f"tf.distribute, {size} replicas", before, after)
