// Error codes of CANN's C interface, and the exception that becomes one of them.
#pragma once

#include <stdexcept>
#include <string>

namespace npusim {

// Numbers as torch_npu 2.13.0 tells them apart (csrc/core/npu/NPUException.cpp) and as CANN's list of
// return codes gives them.
enum Code : int {
  kOk = 0,
  kInvalidParam = 100000,
  kUninitialized = 100001,
  kRepeatInitialize = 100002,
  kInvalidDevice = 107001,
  kNoContext = 107002,
  kUnknownStream = 107003,
  kSubscribed = 107011,
  kNotSubscribed = 107015,
  kWaitTimeout = 107019,
  kCaptureDependency = 107024,
  kStreamUnjoined = 107025,
  kModelCaptured = 107026,
  kStreamCaptured = 107027,
  kEventCaptured = 107028,
  kStreamNotCaptured = 107029,
  kCaptureMode = 107030,
  kCaptureImplicit = 107031,
  kCaptureConflict = 107032,
  kCaptureUnmatched = 107036,
  kCaptureWrongThread = 107038,
  kNotSupported = 200001,
  kFeature = 207000,
  kOutOfMemory = 207001,
  kDeviceException = 507015,
  kStreamTimeout = 507046,
  kEventTimeout = 507047,
};

// Thrown by whatever a call or a task does wrong; the caller of a task keeps it as the stream's
// sticky error, the boundary of a C function returns its code.
struct Failure : std::runtime_error {
  Failure(int code, const std::string& what) : std::runtime_error(what), code(code) {}
  int code;
};

}  // namespace npusim
