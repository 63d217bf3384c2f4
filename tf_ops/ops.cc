// Op definitions and shape functions. What they compute is defined by hvd_eightbit/reference.py.

#include "agreement.h"
#include "codec.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace hvd_eightbit {
namespace {

using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;
using Status = decltype(tensorflow::shape_inference::UnknownShape(nullptr));

#define EIGHTBIT_RETURN_IF_ERROR(expression) \
  do {                                       \
    Status status = (expression);            \
    if (!status.ok()) return status;         \
  } while (false)

Status CheckValues(InferenceContext* c, int input) {
  ShapeHandle values;
  EIGHTBIT_RETURN_IF_ERROR(c->WithRank(c->input(input), 1, &values));
  DimensionHandle codes;
  return c->WithValue(c->Dim(values, 0), kCodes, &codes);
}

}  // namespace

REGISTER_OP("EightBitQuantize")
    .Input("x: T")
    .Input("values: float")
    .Output("codes: uint8")
    .Output("absmax: float")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("block_size: int >= 0")
    .SetShapeFn([](InferenceContext* c) {
      EIGHTBIT_RETURN_IF_ERROR(CheckValues(c, 1));
      c->set_output(0, c->input(0));
      c->set_output(1, c->Vector(InferenceContext::kUnknownDim));
      return Status();
    });

REGISTER_OP("EightBitDequantize")
    .Input("codes: uint8")
    .Input("absmax: float")
    .Input("values: float")
    .Output("x: T")
    .Attr("T: {half, bfloat16, float, double} = DT_FLOAT")
    .Attr("block_size: int >= 0")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle absmax;
      EIGHTBIT_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &absmax));
      EIGHTBIT_RETURN_IF_ERROR(CheckValues(c, 2));
      c->set_output(0, c->input(0));
      return Status();
    });

REGISTER_OP("EightBitPack")
    .Input("tensors: N * T")
    .Input("values: float")
    .Input("ranks: int32")
    .Input("rank: int32")
    .Output("messages: uint8")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("N: int >= 1")
    .Attr("block_size: int >= 0")
    // What it gives goes to a collective. TensorFlow's graph optimizer runs a stateless op with constant inputs, and
    // all that follows it, while it optimizes; Horovod's ops are stateless, so the collective too, and the ranks would
    // wait for one another forever wherever they do not all do so.
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      const int tensors = c->num_inputs() - 3;
      EIGHTBIT_RETURN_IF_ERROR(CheckValues(c, tensors));
      DimensionHandle ranks;
      EIGHTBIT_RETURN_IF_ERROR(c->MakeDimForScalarInput(tensors + 1, &ranks));
      c->set_output(0, c->Matrix(ranks, InferenceContext::kUnknownDim));
      return Status();
    });

REGISTER_OP("EightBitReduce")
    .Input("received: uint8")
    .Input("tensors: N * T")
    .Input("values: float")
    .Input("rank: int32")
    .Output("message: uint8")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("N: int >= 1")
    .Attr("block_size: int >= 0")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle received;
      EIGHTBIT_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &received));
      EIGHTBIT_RETURN_IF_ERROR(CheckValues(c, c->num_inputs() - 2));
      c->set_output(0, c->Vector(c->Dim(received, 1)));
      return Status();
    });

REGISTER_OP("EightBitUnpack")
    .Input("gathered: uint8")
    .Input("like: N * T")
    .Input("values: float")
    .Input("scale: float")
    .Output("outputs: N * T")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("N: int >= 1")
    .Attr("block_size: int >= 0")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle shape;
      EIGHTBIT_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &shape));
      EIGHTBIT_RETURN_IF_ERROR(CheckValues(c, c->num_inputs() - 2));
      EIGHTBIT_RETURN_IF_ERROR(c->WithRank(c->input(c->num_inputs() - 1), 0, &shape));
      for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->input(1 + i));
      return Status();
    });

// Stateful, so that it is neither folded into a constant nor merged with another: what follows it talks to other ranks.
REGISTER_OP("EightBitProbe")
    .Input("rank: int32")
    .Output("probe: T")
    .Attr("T: {float, double}")
    .Attr("fingerprint: int")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(kProbe));
      return Status();
    });

REGISTER_OP("EightBitAgreedScale")
    .Input("reduced: T")
    .Input("ranks: int32")
    .Output("scale: float")
    .Attr("T: {float, double}")
    .Attr("fingerprint: int")
    .Attr("what: string")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Scalar());
      return Status();
    });

}  // namespace hvd_eightbit
