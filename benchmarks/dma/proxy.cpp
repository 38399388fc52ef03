// Implementation of proxy.hpp: the thread that takes requests from the ring and enqueues copies on its stream.
#include "proxy.hpp"

#include "util/error.hpp"

namespace ark {

std::string why_refused(const protocol::Request& request, uint64_t from_bytes, uint64_t to_bytes, size_t channels) {
  using protocol::Request;
  const auto beyond = [&](uint64_t offset, uint64_t bytes) { return offset > bytes || request.bytes > bytes - offset; };
  const auto place = [&](uint64_t offset, uint64_t bytes) {
    return std::to_string(request.bytes) + " bytes at " + std::to_string(offset) + " of a window of " +
           std::to_string(bytes);
  };
  if (request.kind != Request::put && request.kind != Request::put_with_signal && request.kind != Request::signal)
    return "it is of the unknown kind " + std::to_string(request.kind);
  if (request.kind != Request::put && request.channel >= channels)
    return "it signals channel " + std::to_string(request.channel) + " of " + std::to_string(channels);
  if (request.kind == Request::signal) return "";
  if (beyond(request.from, from_bytes)) return "it reads " + place(request.from, from_bytes);
  if (beyond(request.to, to_bytes)) return "it writes " + place(request.to, to_bytes);
  return "";
}

Proxy::Proxy(int device, Window from, Window to, std::vector<uint64_t*> arrived, uint64_t told)
    : device_(device),
      from_(from),
      to_(to),
      arrived_(std::move(arrived)),
      told_(arrived_.size(), told),
      ring_(device, sizeof(protocol::RequestRing)),
      head_(DeviceMemory::allocate(device, sizeof(uint64_t))) {
  const RelaxedCapture relaxed;
  const CurrentContext context(device);
  ark::check(driver().stream_create_with_priority(&stream_, CU_STREAM_NON_BLOCKING, 0), "cuStreamCreateWithPriority");
  server_ = std::make_unique<RequestServer>(*static_cast<protocol::RequestRing*>(ring_.host()),
                                            [this](const protocol::Request& request) { serve(request); });
}

Proxy::~Proxy() {
  server_.reset();
  try {
    const RelaxedCapture relaxed;
    const CurrentContext context(device_);
    driver().stream_synchronize(stream_);  // returns, because its operations only wait for earlier copies
    driver().stream_destroy(stream_);
  } catch (const Error&) {  // at exit the driver may already be unloaded
  }
}

void Proxy::serve(const protocol::Request& request) {
  const std::string why = why_refused(request, from_.bytes, to_.bytes, arrived_.size());
  if (!why.empty())
    throw Error(ErrorKind::invalid_argument, "a kernel's request to the proxy is refused: " + why,
                ErrorContext{-1, -1, "", 0, "Put to and from the memory that this channel was made with."});
  const RelaxedCapture relaxed;
  const CurrentContext context(device_);
  if (request.kind != protocol::Request::signal && request.bytes != 0)
    ark::check(driver().memcpy_async(reinterpret_cast<CUdeviceptr>(to_.data + request.to),
                                     reinterpret_cast<CUdeviceptr>(from_.data + request.from), request.bytes, stream_),
               "cuMemcpyAsync");
  if (request.kind != protocol::Request::put)
    ark::check(driver().stream_write_value64(stream_, reinterpret_cast<CUdeviceptr>(arrived_[request.channel]),
                                             ++told_[request.channel], CU_STREAM_WRITE_VALUE_DEFAULT),
               "cuStreamWriteValue64");
}

void Proxy::stop() {
  server_->stop();
}

void Proxy::synchronize() {
  const CurrentContext context(device_);
  ark::check(driver().stream_synchronize(stream_), "the proxy's copies");
}

void Proxy::check() const {
  server_->check();
}

}  // namespace ark
