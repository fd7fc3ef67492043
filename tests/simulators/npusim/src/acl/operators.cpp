// The two operators of the older interface that a private format cannot do without: TransData, which
// lays the same elements out in another format, and Identity, which does so too where the formats
// of its operands differ (torch_npu 2.13.0 casts formats by it), and else copies.
//
// FRACTAL_NZ, as CANN documents it: the last two dimensions (h, w) are cut into tiles of 16 rows and
// as many columns as 32 bytes hold (16 where an element has 2 bytes, ASSUMED 16 for 4 bytes as
// torch_npu's own storage shape says); a tile's elements lie together, tiles go down each column of
// tiles first, and what a tile has beyond the tensor is zero.

#include <cstring>

#include "../core/memory.h"
#include "../core/stream.h"
#include "api.h"
#include "descriptors.h"

using namespace npusim;

namespace {

// One tensor as an operator sees it, long after its descriptor was destroyed.
struct Operand {
  Descriptor descriptor;
  void* data;

  size_t bytes() const {
    return static_cast<size_t>(elements(descriptor.storage_shape)) * element_bytes(descriptor.type);
  }
  uint8_t* at(const char* what) const { return host(data, bytes(), what); }
};

// Where the element (batch, row, column) of a tensor of `shape` lies in its storage.
class Layout {
 public:
  explicit Layout(const Descriptor& of) : tiled_(of.storage_format == kFractalNz) {
    const size_t count = of.shape.size();
    rows_ = count > 1 ? of.shape[count - 2] : 1;
    columns_ = count > 0 ? of.shape[count - 1] : 1;
    batches_ = rows_ * columns_ == 0 ? 0 : elements(of.shape) / (rows_ * columns_);
    if (!tiled_) return;
    const Dims& stored = of.storage_shape;
    if (stored.size() < 4) throw Failure(kInvalidParam, "tiles need four dimensions");
    width_ = stored[stored.size() - 1];
    height_ = stored[stored.size() - 2];
    down_ = stored[stored.size() - 3];
    across_ = stored[stored.size() - 4];
    if (down_ * height_ < rows_ || across_ * width_ < columns_) {
      throw Failure(kInvalidParam, "tiles that do not cover their tensor");
    }
  }

  int64_t batches() const { return batches_; }
  int64_t rows() const { return rows_; }
  int64_t columns() const { return columns_; }

  int64_t place(int64_t batch, int64_t row, int64_t column) const {
    if (!tiled_) return (batch * rows_ + row) * columns_ + column;
    const int64_t tile = (batch * across_ + column / width_) * down_ + row / height_;
    return (tile * height_ + row % height_) * width_ + column % width_;
  }

 private:
  bool tiled_;
  int64_t batches_ = 0, rows_ = 0, columns_ = 0;
  int64_t across_ = 0, down_ = 0, height_ = 0, width_ = 0;
};

void lay_out(const Operand& from, const Operand& to) {
  const Layout source(from.descriptor), target(to.descriptor);
  const size_t size = element_bytes(from.descriptor.type);
  const uint8_t* const in = from.at("the input of a cast of formats");
  uint8_t* const out = to.at("the output of a cast of formats");
  memset(out, 0, to.bytes());
  for (int64_t batch = 0; batch < source.batches(); ++batch) {
    for (int64_t row = 0; row < source.rows(); ++row) {
      for (int64_t column = 0; column < source.columns(); ++column) {
        memcpy(out + static_cast<size_t>(target.place(batch, row, column)) * size,
               in + static_cast<size_t>(source.place(batch, row, column)) * size, size);
      }
    }
  }
}

void check(const Operand& from, const Operand& to) {
  const bool fits = from.descriptor.type == to.descriptor.type &&
                    elements(from.descriptor.shape) == elements(to.descriptor.shape);
  if (!fits) {
    fault("an operator of one input and one output that do not fit");
    throw Failure(kInvalidParam, "operands that do not fit");
  }
}

// torch_npu falls back to the older interface where an operator is missing in libopapi.
Body refuse(const std::string& name) {
  const std::string what = text("the operator %s of the older interface is not simulated, nor is "
                                "the aclnn operator that torch_npu tries before it", name.c_str());
  fault(what);
  throw Failure(kNotSupported, what);
}

Body body_of(const std::string& name, const Operand& from, const Operand& to) {
  check(from, to);
  if (name == "TransData") return at_once([=] { lay_out(from, to); });
  const bool alike = from.descriptor.storage_format == to.descriptor.storage_format;
  if (name == "Identity" && alike) return copy_bytes(to.data, from.data, to.bytes());
  if (name == "Identity") return at_once([=] { lay_out(from, to); });
  return refuse(name);
}

}  // namespace

NPUSIM_API int aclopCompileAndExecute(const char* name, int inputs, const Descriptor* const* taken,
                                      const Buffer* const* sources, int outputs,
                                      const Descriptor* const* given, Buffer* const* targets,
                                      const Attributes*, int, int, const char*, void* stream) {
  return guarded("aclopCompileAndExecute", [=] {
    if (tracing()) trace(name);
    if (inputs != 1 || outputs != 1) refuse(name);
    const Operand from{*taken[0], sources[0]->data}, to{*given[0], targets[0]->data};
    const int code = submit(stream, name, body_of(name, from, to));
    if (code != kOk) throw Failure(code, recent_error());
  });
}

NPUSIM_API int aclopCompileAndExecuteV2(const char* name, int inputs, Descriptor** taken,
                                        Buffer** sources, int outputs, Descriptor** given,
                                        Buffer** targets, Attributes* attributes, int engine,
                                        int compile, const char* path, void* stream) {
  return aclopCompileAndExecute(name, inputs, taken, sources, outputs, given, targets, attributes,
                                engine, compile, path, stream);
}
