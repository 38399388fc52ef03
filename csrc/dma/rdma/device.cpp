// Queries devices, ports and GIDs through libibverbs and picks the first usable port. Every port that is passed over
// leaves a reason, so that the error and `ark doctor` can say what to change.
#include "dma/rdma/device.hpp"

#include <arpa/inet.h>
#include <fcntl.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>

namespace ark::rdma {

namespace {

constexpr int kMostPorts = 16, kMostGids = 1024;  // bounds on what a driver reports

const char* name_of(ibv_port_state state) {
  switch (state) {
    case IBV_PORT_DOWN: return "down";
    case IBV_PORT_INIT: return "initialising";
    case IBV_PORT_ARMED: return "armed";
    case IBV_PORT_ACTIVE: return "active";
    case IBV_PORT_ACTIVE_DEFER: return "deferred";
    default: return "unknown";
  }
}

bool is_zero(const ibv_gid& gid) {
  return gid.global.subnet_prefix == 0 && gid.global.interface_id == 0;
}

bool is_ipv4(const ibv_gid& gid) {
  static constexpr uint8_t prefix[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  return std::memcmp(gid.raw, prefix, sizeof prefix) == 0;
}

// Reads the GID's type from sysfs, for libraries without ibv_query_gid_ex.
ibv_gid_type type_in_sysfs(const std::string& device, int port, int index) {
  std::ifstream file("/sys/class/infiniband/" + device + "/ports/" + std::to_string(port) + "/gid_attrs/types/" +
                     std::to_string(index));
  std::string type;
  std::getline(file, type);
  return type == "RoCE v2" ? IBV_GID_TYPE_ROCE_V2 : IBV_GID_TYPE_ROCE_V1;
}

struct Gid {
  ibv_gid gid{};
  ibv_gid_type type = IBV_GID_TYPE_IB;
};

// Returns false if the entry is empty.
bool read_gid(const Verbs& verbs, ibv_context* context, const PortInfo& port, int index, Gid& found) {
  ibv_gid_entry entry{};
  if (verbs.query_gid_ex && verbs.query_gid_ex(context, static_cast<uint32_t>(port.port), static_cast<uint32_t>(index),
                                               &entry, 0, sizeof entry) == 0) {
    found = {entry.gid, static_cast<ibv_gid_type>(entry.gid_type)};
  } else {
    if (verbs.query_gid(context, static_cast<uint8_t>(port.port), index, &found.gid) != 0) return false;
    found.type = port.ethernet ? type_in_sysfs(port.device, port.port, index) : IBV_GID_TYPE_IB;
  }
  return !is_zero(found.gid);
}

std::string text_of_type(const Gid& gid) {
  if (gid.type == IBV_GID_TYPE_IB) return "InfiniBand";
  return std::string(gid.type == IBV_GID_TYPE_ROCE_V2 ? "RoCE v2" : "RoCE v1") +
         (is_ipv4(gid.gid) ? ", IPv4" : ", IPv6");
}

// Prefers RoCE v2 over v1, then IPv4 over IPv6, then a routed address over a link-local one.
int rank_of(const Gid& gid) {
  const bool link_local = gid.gid.raw[0] == 0xfe && gid.gid.raw[1] == 0x80;
  return (gid.type == IBV_GID_TYPE_ROCE_V2 ? 4 : 0) + (is_ipv4(gid.gid) ? 2 : 0) + (link_local ? 0 : 1);
}

void choose_gid(const Verbs& verbs, ibv_context* context, const Options& options, int entries, PortInfo& port) {
  if (options.gid_index >= 0) {
    Gid gid;
    if (options.gid_index < entries && read_gid(verbs, context, port, options.gid_index, gid)) {
      port.gid_index = options.gid_index;
      port.gid = gid.gid;
      port.gid_type = text_of_type(gid);
      return;
    }
    std::string there;
    for (int index = 0; index < std::min(entries, kMostGids); ++index)
      if (read_gid(verbs, context, port, index, gid))
        there += (there.empty() ? "" : ", ") + std::to_string(index) + " (" + text_of_type(gid) + ": " +
                 text_of(gid.gid) + ")";
    port.trouble = "GID " + std::to_string(options.gid_index) + " (ARK_RDMA_GID_INDEX) is empty; there are " +
                   (there.empty() ? "none" : there);
    return;
  }
  int best = -1;
  for (int index = 0; index < std::min(entries, kMostGids); ++index) {
    Gid gid;
    if (!read_gid(verbs, context, port, index, gid)) continue;
    const int rank = rank_of(gid);
    if (rank <= best) continue;
    best = rank;
    port.gid_index = index;
    port.gid = gid.gid;
    port.gid_type = text_of_type(gid);
  }
  if (best < 0 && port.ethernet)
    port.trouble = "its port " + std::to_string(port.port) + " has no GID: give its network interface an address";
}

PortInfo look(const Verbs& verbs, ibv_context* context, const std::string& device, int number, const Options& options) {
  PortInfo port;
  port.device = device;
  port.port = number;
  ibv_port_attr attributes;
  std::memset(&attributes, 0, sizeof attributes);  // the library may fill in a shorter struct
  if (const int error = verbs.query_port(context, static_cast<uint8_t>(number), &attributes)) {
    port.trouble = "its port " + std::to_string(number) + " cannot be asked: " + std::strerror(error);
    return port;
  }
  port.state = name_of(attributes.state);
  port.active = attributes.state == IBV_PORT_ACTIVE;
  port.ethernet = attributes.link_layer == IBV_LINK_LAYER_ETHERNET;
  port.mtu = 128 << std::min<uint32_t>(attributes.active_mtu, IBV_MTU_4096);
  port.most_bytes = attributes.max_msg_sz;
  port.lid = attributes.lid;
  port.pkeys = attributes.pkey_tbl_len;
  if (!port.active) {
    port.trouble = "its port " + std::to_string(number) + " is " + port.state +
                   (port.ethernet ? ": bring its network interface up (`ip link set ... up`, `rdma link`)"
                                  : ": see the cable and the subnet manager (`ibstat`)");
    return port;
  }
  choose_gid(verbs, context, options, attributes.gid_tbl_len, port);
  if (port.trouble.empty() && options.mtu > port.mtu)
    port.trouble = "its MTU is " + std::to_string(port.mtu) + " bytes, and " + std::to_string(options.mtu) +
                   " are asked for (ARK_RDMA_MTU)";
  if (port.trouble.empty() && port.pkeys > 0 && options.pkey_index >= port.pkeys)
    port.trouble = "it has " + std::to_string(port.pkeys) + " partition keys, and number " +
                   std::to_string(options.pkey_index) + " is asked for (ARK_RDMA_PKEY_INDEX, from 0)";
  return port;
}

// Splits "a,b". Empty for any device.
std::vector<std::string> names_in(const std::string& list) {
  std::vector<std::string> names;
  std::istringstream text(list == "all" ? "" : list);
  for (std::string name; std::getline(text, name, ',');) names.push_back(name);
  return names;
}

Error no_device() {
  return Error(ErrorKind::system, "libibverbs finds no RDMA device",
               ErrorContext{-1, -1, "init", 0,
                            "See `rdma link` and whether the NIC's driver and rdma-core's provider are installed "
                            "(Debian: ibverbs-providers)."});
}

Error unknown_device(const std::string& name, const std::string& there) {
  return Error(ErrorKind::invalid_argument,
               "there is no RDMA device \"" + name + "\" (ARK_RDMA_DEVICE); there are " + there,
               ErrorContext{-1, -1, "init", 0, "Name one of these, or unset ARK_RDMA_DEVICE."});
}

// Calls visit(context, limits, ports) for each device. A visit that returns true keeps the context and ends the loop.
template <class Visit>
void visit_devices(const Verbs& verbs, const Options& options, std::string& names, Visit&& visit) {
  int count = 0;
  ibv_device** list = verbs.get_device_list(&count);
  if (!list)
    throw Error(ErrorKind::system, std::string("the list of RDMA devices cannot be read: ") + std::strerror(errno),
                ErrorContext{-1, -1, "init", 0, "See whether the kernel's module ib_uverbs is loaded."});
  const std::vector<std::string> wanted = names_in(options.device);
  for (int i = 0; i < count; ++i) {
    const std::string name = verbs.get_device_name(list[i]);
    names += (names.empty() ? "" : ", ") + name;
    if (!wanted.empty() && std::find(wanted.begin(), wanted.end(), name) == wanted.end()) continue;
    ibv_context* context = verbs.open_device(list[i]);
    ibv_device_attr limits{};
    std::vector<PortInfo> ports;
    if (!context || verbs.query_device(context, &limits) != 0) {
      PortInfo closed;
      closed.device = name;
      closed.trouble = std::string("it cannot be opened: ") + std::strerror(errno) +
                       " (see the permissions of /dev/infiniband/uverbs*)";
      ports.push_back(closed);
    }
    for (int port = 1; context && port <= std::min<int>(limits.phys_port_cnt, kMostPorts); ++port)
      if (options.port == 0 || options.port == port) ports.push_back(look(verbs, context, name, port, options));
    if (context && options.port > limits.phys_port_cnt) {
      PortInfo none;
      none.device = name;
      none.port = options.port;
      none.trouble = "it has " + std::to_string(limits.phys_port_cnt) + " ports, and number " +
                     std::to_string(options.port) + " is asked for (ARK_RDMA_PORT, from 1)";
      ports.push_back(none);
    }
    if (visit(context, limits, ports)) break;
    if (context) verbs.close_device(context);
  }
  verbs.free_device_list(list);
}

}  // namespace

std::string text_of(const ibv_gid& gid) {
  char text[INET6_ADDRSTRLEN] = "";
  if (is_ipv4(gid)) {
    inet_ntop(AF_INET, gid.raw + 12, text, sizeof text);
  } else {
    inet_ntop(AF_INET6, gid.raw, text, sizeof text);
  }
  return text;
}

std::vector<std::string> wanted_devices(const Verbs& verbs, const Options& options) {
  int count = 0;
  ibv_device** list = verbs.get_device_list(&count);
  std::vector<std::string> all;
  std::string there;
  for (int i = 0; list && i < count; ++i) {
    all.push_back(verbs.get_device_name(list[i]));
    there += (i > 0 ? ", " : "") + all.back();
  }
  if (list) verbs.free_device_list(list);
  if (all.empty()) throw no_device();
  std::vector<std::string> wanted = names_in(options.device);
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (std::find(all.begin(), all.end(), wanted[i]) == all.end()) throw unknown_device(wanted[i], there);
    if (std::find(wanted.begin(), wanted.begin() + i, wanted[i]) != wanted.begin() + i)
      throw Error(ErrorKind::invalid_argument, "RDMA device \"" + wanted[i] + "\" is named twice (ARK_RDMA_DEVICE)",
                  ErrorContext{-1, -1, "init", 0, "Name each device once."});
  }
  return wanted.empty() ? all : wanted;
}

std::vector<PortInfo> ports_of(const Verbs& verbs, const Options& options) {
  std::vector<PortInfo> all;
  std::string names;
  visit_devices(verbs, options, names, [&](ibv_context*, const ibv_device_attr&, const std::vector<PortInfo>& ports) {
    all.insert(all.end(), ports.begin(), ports.end());
    return false;
  });
  return all;
}

std::shared_ptr<Device> Device::open(std::shared_ptr<const Verbs> verbs, const Options& options) {
  std::shared_ptr<Device> device(new Device(verbs, options));
  std::string names, trouble;
  visit_devices(*verbs, options, names,
                [&](ibv_context* context, const ibv_device_attr& limits, const std::vector<PortInfo>& ports) {
                  for (const PortInfo& port : ports) {
                    if (port.trouble.empty()) {
                      device->context_ = context;
                      device->limits_ = limits;
                      device->port_ = port;
                      return true;
                    }
                    trouble += (trouble.empty() ? "" : "; ") + port.device + ": " + port.trouble;
                  }
                  return false;
                });
  const bool asked = !options.device.empty();
  if (!device->context_) {
    if (names.empty()) throw no_device();
    if (trouble.empty()) throw unknown_device(options.device, names);
    throw Error(asked || options.gid_index >= 0 || options.port > 0 ? ErrorKind::invalid_argument : ErrorKind::system,
                "no RDMA device can be used: " + trouble,
                ErrorContext{-1, -1, "init", 0, "`ibv_devinfo -v` shows all ports and GIDs."});
  }
  device->domain_ = verbs->alloc_pd(device->context_);
  if (!device->domain_) throw system_error("no protection domain on " + device->port_.device, errno);
  // The engine's thread reads events and must not block on this descriptor.
  const int events = device->context_->async_fd;
  ::fcntl(events, F_SETFL, ::fcntl(events, F_GETFL) | O_NONBLOCK);
  return device;
}

Device::Device(std::shared_ptr<const Verbs> verbs, Options options)
    : verbs_(std::move(verbs)), options_(std::move(options)) {}

Device::~Device() {
  if (domain_) verbs_->dealloc_pd(domain_);
  if (context_) verbs_->close_device(context_);
}

std::string Device::text() const {
  return port_.device + " port " + std::to_string(port_.port) +
         (port_.gid_index < 0
              ? ", LID " + std::to_string(port_.lid)
              : ", GID " + std::to_string(port_.gid_index) + " (" + port_.gid_type + ": " + text_of(port_.gid) + ")") +
         ", MTU " + std::to_string(port_.mtu);
}

}  // namespace ark::rdma
