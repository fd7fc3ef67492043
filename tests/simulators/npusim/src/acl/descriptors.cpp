#include "descriptors.h"

#include "api.h"

using namespace npusim;

namespace npusim {

size_t element_bytes(int type) {
  switch (type) {
    case 2: case 4: case 12: return 1;           // int8, uint8, bool
    case 1: case 6: case 7: case 27: return 2;   // fp16, int16, uint16, bf16
    case 0: case 3: case 8: return 4;            // fp32, int32, uint32
    case 9: case 10: case 11: return 8;          // int64, uint64, fp64
    default: throw Failure(kInvalidParam, text("elements of type %d", type));
  }
}

int64_t elements(const Dims& dims) {
  int64_t count = 1;
  for (const int64_t extent : dims) count *= extent;
  return count;
}

}  // namespace npusim

NPUSIM_API Descriptor* aclCreateTensorDesc(int type, int count, const int64_t* dims, int format) {
  auto* const made = new Descriptor;
  made->type = type;
  made->shape.assign(dims, dims + count);
  made->format = format;
  made->storage_shape = made->shape;
  made->storage_format = format;
  return made;
}

NPUSIM_API void aclDestroyTensorDesc(const Descriptor* descriptor) { delete descriptor; }

NPUSIM_API int aclSetTensorFormat(Descriptor* descriptor, int format) {
  descriptor->storage_format = format;
  return kOk;
}

NPUSIM_API int aclSetTensorShape(Descriptor* descriptor, int count, const int64_t* dims) {
  descriptor->storage_shape.assign(dims, dims + count);
  return kOk;
}

NPUSIM_API int aclSetTensorPlaceMent(Descriptor*, int) { return kOk; }

NPUSIM_API void aclSetTensorDescName(Descriptor*, const char*) {}

NPUSIM_API int aclGetTensorDescType(const Descriptor* descriptor) { return descriptor->type; }

NPUSIM_API int aclGetTensorDescFormat(const Descriptor* descriptor) { return descriptor->format; }

NPUSIM_API size_t aclGetTensorDescNumDims(const Descriptor* descriptor) {
  return descriptor->shape.size();
}

NPUSIM_API int aclGetTensorDescDimV2(const Descriptor* descriptor, size_t index, int64_t* extent) {
  if (index >= descriptor->shape.size()) return kInvalidParam;
  *extent = descriptor->shape[index];
  return kOk;
}

NPUSIM_API Buffer* aclCreateDataBuffer(void* data, size_t bytes) { return new Buffer{data, bytes}; }

NPUSIM_API int aclDestroyDataBuffer(const Buffer* buffer) {
  delete buffer;
  return kOk;
}

NPUSIM_API Attributes* aclopCreateAttr() { return new Attributes; }

NPUSIM_API void aclopDestroyAttr(const Attributes* attributes) { delete attributes; }

// No operator here reads its attributes: descriptors say everything.
#define NPUSIM_IGNORED_ATTRIBUTE(name) \
  NPUSIM_API int name() { return kOk; }

NPUSIM_IGNORED_ATTRIBUTE(aclopSetAttrBool)
NPUSIM_IGNORED_ATTRIBUTE(aclopSetAttrDataType)
NPUSIM_IGNORED_ATTRIBUTE(aclopSetAttrFloat)
NPUSIM_IGNORED_ATTRIBUTE(aclopSetAttrInt)
NPUSIM_IGNORED_ATTRIBUTE(aclopSetAttrListBool)
NPUSIM_IGNORED_ATTRIBUTE(aclopSetAttrListFloat)
NPUSIM_IGNORED_ATTRIBUTE(aclopSetAttrListInt)
NPUSIM_IGNORED_ATTRIBUTE(aclopSetAttrListListInt)
NPUSIM_IGNORED_ATTRIBUTE(aclopSetAttrString)
